"""Calibration text: one text, or several, each with its share of the windows."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gac.core.errors import TextError
from gac.measurement.documents import Documents, Text, ordered
from gac.measurement.images import digest_of_examples, holds_messages
from gac.measurement.text import (
    SELF,
    TextSpec,
    Windows,
    as_examples,
    calibration_windows,
    check_text,
    digest_of,
    is_sized_text,
)
from gac.models.examples import Examples

_SPLITS = 16
Part = TextSpec | Documents
CalibrationText = Text | Part | Iterable[str | Part]
"""Calibration text as a caller may pass it, see ``Texts.of``."""
Cutter = Callable[[Part], Windows | None]
"""Cuts the windows of texts that need the model, which it writes or reads with images; None for any other text."""


@dataclass(frozen=True)
class Texts:
    """Texts to calibrate on, each with its windows; all of one length, and none of them twice."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if len(lengths := {part.length for part in self.parts}) > 1:
            problem = f"calibration windows of {' and '.join(map(str, sorted(lengths)))} tokens"
            raise TextError(problem, "one length for all texts", "Give all of them the same: NAME:32x1024.")
        names = [part.name for part in self.parts if isinstance(part, TextSpec)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise TextError(f"the calibration text {twice} twice", "each text once", "Add up its windows.")

    @classmethod
    def of(cls, text: CalibrationText) -> "Texts":
        """Parse calibration text in any form that a caller may pass.

        A string is a name or a path. A list is one of texts where one of its items is a ``TextSpec``, ``Documents``, or
        a known name or a file with its windows, as ``notes.txt:32x1024``. The other items then have to be texts too.
        Any other iterable of strings holds documents.

        Raises:
            TextError: a size below 1, a text that is neither known nor a file, or documents that are no strings.
        """
        if isinstance(text, (str, os.PathLike)):
            return cls((TextSpec.parse(str(text)),))
        if isinstance(text, Part):
            return cls((text,))
        if not isinstance(text, Iterable):
            expected = "a name, a path, documents, or a list of these"
            raise TextError(f"a {type(text).__name__} as calibration text", expected, "Name one, such as wiki-sample.")
        items = ordered(text)
        # No document is a known name or a file with its windows.
        if any(is_sized_text(item) if isinstance(item, str) else isinstance(item, Part) for item in items):
            return cls(tuple(map(_part, items)))
        return cls((Documents(items),))

    @property
    def name(self) -> str:
        if len(self.parts) == 1:
            return self.parts[0].name
        return " and ".join(f"{part.name} ({part.windows})" for part in self.parts)

    @property
    def written(self) -> str | tuple[str, ...]:
        each = tuple(str(part) if isinstance(part, TextSpec) else part.name for part in self.parts)
        return each[0] if len(each) == 1 else each

    @property
    def windows(self) -> int:
        return sum(part.windows for part in self.parts)

    @property
    def length(self) -> int:
        return self.parts[0].length

    @property
    def documents(self) -> tuple[str, ...]:
        return tuple(digest for part in self.parts if isinstance(part, Documents) for digest in part.digests)

    def sized(self, windows: Sequence[int], length: int) -> "Texts":
        sized = zip(self.parts, windows, strict=True)
        return Texts(tuple(replace(part, windows=count, length=length) for part, count in sized))

    def cut(self, tokenizer: Any, seed: int = 0, bos: bool | None = None, special: Cutter | None = None) -> Windows:
        """The windows of all of them, in the order of ``interleaved``; as ``calibration_windows`` otherwise.

        Args:
            special: cuts what needs the model; without it that is refused.
        """
        each = [
            (special(part) if special else None) or calibration_windows(part, tokenizer, seed, bos)
            for part in self.parts
        ]
        if len(each) == 1:
            return each[0]
        order, rows = interleaved([len(windows) for windows in each]), [iter(windows.ids) for windows in each]
        ids = torch.stack([next(rows[part]) for part in order])
        places = [tuple(number for number, part in enumerate(order) if part == index) for index in range(len(each))]
        texts = tuple(replace(windows, numbers=numbers) for windows, numbers in zip(each, places, strict=True))
        joined = replace(each[0], name=self.name, ids=ids, digest=digest_of(ids), texts=texts, examples=None)
        if all(windows.examples is None for windows in each):
            return joined
        singly = [iter(as_examples(windows)) for windows in each]
        examples = [next(singly[part]) for part in order]
        return replace(joined, digest=digest_of_examples(examples), examples=Examples(tuple(examples)))


def is_sampled(part: Part) -> bool:
    """Return whether the dense model writes the text."""
    return isinstance(part, TextSpec) and part.name == SELF


def has_messages(part: Part) -> bool:
    """Return whether the text is a file of chat messages, which may have images."""
    return isinstance(part, TextSpec) and holds_messages(part.name)


def interleaved(counts: Sequence[int]) -> list[int]:
    """Order windows of several texts so that every k-th window, too, has the texts in their shares.

    The next window is of the part that is most overdue, summed over the windows so far and over those among them that
    are whole multiples of 2, 3, ... 16 windows away.
    """
    total, remaining = sum(counts), list(counts)
    taken = {(step, position): [0] * len(counts) for step in range(1, _SPLITS + 1) for position in range(step)}
    order = []
    for position in range(total):
        alike = [taken[step, position % step] for step in range(1, _SPLITS + 1)]
        overdue = [
            sum(count * (sum(counter) + 1) - total * counter[part] for counter in alike)
            for part, count in enumerate(counts)
        ]
        chosen = max((part for part, more in enumerate(remaining) if more), key=overdue.__getitem__)
        remaining[chosen] -= 1
        for counter in alike:
            counter[chosen] += 1
        order.append(chosen)
    return order


def _part(item: str | Part) -> Part:
    if isinstance(item, Part):
        return item
    if not isinstance(item, str):
        problem = f"a {type(item).__name__} among calibration texts"
        raise TextError(problem, "names, paths, gac.Documents", "Leave it out.")
    spec = TextSpec.parse(item)
    check_text(spec.name, sampled=True)
    return spec
