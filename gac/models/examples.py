"""Windows of token ids, and examples: windows that may come with images.

Text is one tensor of token ids ``(windows, tokens)``, and all its windows run alike. An example brings what else the
model takes, such as pixels, and its decoder layers are called in a way of their own. It is padded at its end, where no
earlier token attends to, and only its text is predicted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that is not predicted, as PyTorch's losses have it."""


@dataclass(frozen=True, eq=False)
class Example:
    """One window of text about images.

    Attributes:
        ids: token ids, int64, shape ``(tokens,)``; placeholders stand for images, and padding is at the end.
        inputs: what the model takes beside them, by argument; empty for text alone.
        length: tokens before the padding.
        text: True for tokens of text, bool, shape ``(tokens,)``.
    """

    ids: Tensor
    inputs: Mapping[str, Tensor]
    length: int
    text: Tensor

    @cached_property
    def predicting(self) -> Tensor:
        """The positions whose next token is text."""
        return self.text[1:].nonzero().flatten()


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of one padded length; they are counted, indexed and cut as a tensor ``(windows, tokens)`` is."""

    windows: tuple[Example, ...]

    @cached_property
    def ids(self) -> Tensor:
        return torch.stack([example.ids for example in self.windows])

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.windows), len(self.windows[0].ids)

    def numel(self) -> int:
        return len(self.windows) * self.shape[1]

    def __len__(self) -> int:
        return len(self.windows)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.windows)

    @overload
    def __getitem__(self, rows: int) -> Example: ...
    @overload
    def __getitem__(self, rows: Any) -> "TokenWindows": ...
    def __getitem__(self, rows: Any) -> Any:
        """One example by its number; those of a slice, a list or a tensor, which are a tensor where none has images."""
        if isinstance(rows, int):
            return self.windows[rows]
        chosen = self.windows[rows] if isinstance(rows, slice) else tuple(self.windows[int(row)] for row in rows)
        if chosen and not any(example.inputs for example in chosen):
            return torch.stack([example.ids for example in chosen])
        return Examples(chosen)


TokenWindow = Tensor | Example
"""Token ids ``(tokens,)``, or an example."""
TokenWindows = Tensor | Examples
"""Token ids ``(windows, tokens)``, or examples."""


def each_alone(windows: TokenWindows) -> Sequence[Tensor | Example]:
    """Each window as ``gac.models.modules.run_on`` takes it."""
    return windows.windows if isinstance(windows, Examples) else torch.split(windows, 1)


def labels_of(window: TokenWindow) -> Tensor:
    """The next token of all positions but the last, ``(tokens - 1,)``; ``IGNORED`` where it is not predicted."""
    if isinstance(window, Example):
        return window.ids[1:].masked_fill(~window.text[1:], IGNORED)
    return window[1:]


def next_tokens(window: TokenWindow) -> Tensor:
    """The tokens that are predicted, ``(positions,)``."""
    return window.ids[window.predicting + 1] if isinstance(window, Example) else window[1:]


def predicting(window: TokenWindow) -> Tensor | slice:
    """The positions whose predictions count: all of text, those before a token of text in an example."""
    return window.predicting if isinstance(window, Example) else slice(None)


def present(window: TokenWindow) -> slice:
    """The positions before the padding."""
    return slice(window.length if isinstance(window, Example) else None)


def predicted_tokens(windows: TokenWindows) -> int:
    """Count the tokens that are predicted: of each window of text all but the first."""
    return sum(len(next_tokens(window)) for window in windows)


def sizes_of(windows: TokenWindows) -> list[float]:
    """The weight of each window: 1 for text; the share of the padded length that is predicted, for an example."""
    if isinstance(windows, Examples):
        return [len(next_tokens(window)) / (len(window.ids) - 1) for window in windows]
    return [1.0] * len(windows)
