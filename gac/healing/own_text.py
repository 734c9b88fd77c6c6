"""Text that the dense model writes itself: what it says by itself is what it is to go on saying.

No data is needed, and no source is overfitted (LLM-QAT, arXiv 2305.17888). Windows begin with BOS. Where there is a
chat template, the second half of them begins with all that stands in it before a user's first word; what a user says is
then answered (Magpie, arXiv 2406.08464). Beside other texts, all windows go on from pieces of these, so that the model
is heard on what matters. Every token is drawn at temperature 1 from all tokens. It has a random number of its own, so
what is drawn does not depend on how many windows are written side by side. Behind an EOS another document begins in the
same window. The text is kept on disk.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from gac.core.distributed.ranks import Ranks
from gac.core.errors import StatisticsError, TextError
from gac.core.io import home
from gac.core.progress import progress_bar
from gac.healing.logits import in_training
from gac.measurement.store import read_tensors, write_tensors
from gac.measurement.text import Windows, bos_of, windows_of
from gac.models.modules import free_memory, frozen, input_device

SELF = "self"
"""What a text is called that the dense model writes."""
WINDOWS = 512
"""How many are written where nothing is said."""
AT_ONCE, AT_ONCE_GPU = 256, 4096
"""Windows that are written side by side at most, on a GPU more."""
CACHED = 2**33
"""Bytes that they take at most on a CPU."""
FREE = 0.7
"""The part of a GPU's free memory that they take at most."""
COPIES = 3
"""Tensors of a step that are as large as its logits in float32: these, the probabilities and their sums."""
PIECES = 16
"""How many pieces a window of another text makes to go on from."""
DRAW = 4
"""The version of how tokens are drawn: text that was kept by another one is not read."""
MOST = 64
"""Documents for a window at most, before a model counts as one that says nothing."""
ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Kernels that tokens are written with: not cuDNN's, which plans anew for every length."""
_MARK = "0f1e2d3c"


@dataclass(frozen=True)
class Start:
    """The token ids that a kind of document begins with.

    Attributes:
        ids: before its first word.
        reply: between what a user says and the answer; empty where none is given.
    """

    ids: tuple[int, ...]
    reply: tuple[int, ...] = ()


def own_windows(
    model: Any,
    tokenizer: Any,
    digest: str,
    windows: int,
    length: int,
    seed: int,
    beside: Sequence[Windows],
    ranks: Ranks,
    progress: bool,
) -> Windows:
    """So many windows of text by the model, written now or read from disk; BOS is at their heads as in any text.

    Args:
        model: the dense one.
        digest: of its weights.
        seed: of the draw.
        beside: what of other texts is trained on too.

    Raises:
        TextError: the tokenizer has nothing to begin a text with, or the model ends all documents at once.
        StatisticsError: the text cannot be kept, or read.
    """
    head = bos_of(tokenizer)
    starts = pieces_of(beside, head) or starts_of(tokenizer)
    settings = json.dumps([DRAW, digest, windows, length, seed, [asdict(one) for one in starts]])
    path = home() / "own-text" / f"{hashlib.sha256(settings.encode()).hexdigest()[:40]}.safetensors"
    if not ranks.once(path.exists) and ranks.leads:
        write_tensors(path, {"ids": _written(model, starts, windows, length, seed, head, progress)})
    ranks.once(lambda: None)  # the others wait
    try:
        ids = read_tensors(path, torch.device("cpu"))["ids"]
    except (FileNotFoundError, KeyError) as failure:
        raise StatisticsError(
            f"{path} holds no text", "text that the model wrote", "Remove the file, and run the same again."
        ) from failure
    return windows_of(SELF, ids, tokenizer, windows, length)


def starts_of(tokenizer: Any) -> list[Start]:
    """What documents begin with, one for each kind of document.

    Raises:
        TextError: there are none.
    """
    found = [] if tokenizer.bos_token_id is None else [Start((int(tokenizer.bos_token_id),))]
    if getattr(tokenizer, "chat_template", None):
        said = [{"role": "user", "content": _MARK}]
        talk = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        before, _, behind = talk.partition(_MARK)
        ids, reply = (tokenizer(one, add_special_tokens=False)["input_ids"] for one in (before, behind))
        found.append(Start(tuple(ids), tuple(reply)))
    if not any(one.ids for one in found):
        raise TextError(
            f"text 'self' with a {type(tokenizer).__name__} that has neither BOS nor a chat template",
            "something that a text begins with",
            "Name a text, such as wiki-sample.",
        )
    return [one for one in found if one.ids]


def pieces_of(texts: Sequence[Windows], head: int | None) -> list[Start]:
    """What documents begin with that go on from texts: pieces of their windows, in order, each behind a BOS.

    Args:
        head: the BOS; None where there is none.
    """
    begin = () if head is None else (head,)
    found = []
    for text in texts:
        said = text.ids[:, 1:] if text.bos == "windows" else text.ids
        size = max(1, said.shape[1] // PIECES)
        found += said[:, : said.shape[1] // size * size].reshape(-1, size).tolist()
    return [Start((*begin, *piece)) for piece in found]


class Writer:
    """One window that is being written: which token comes next.

    Args:
        starts: what its documents begin with, one after the other.

    Attributes:
        documents: that have ended.
    """

    def __init__(self, starts: Iterator[Start]) -> None:
        self._starts, self._start, self._answers, self.documents = starts, next(starts), False, 0
        self._due = deque(self._start.ids)

    def after(self, drawn: int, ends: Sequence[int]) -> int:
        """The next token, where the model has drawn this one: that one, unless others are due.

        Args:
            ends: the tokens that end what is said.
        """
        if self._due:
            return self._due.popleft()
        if drawn in ends:
            self._answers = bool(self._start.reply) and not self._answers
            if self._answers:
                self._due.extend(self._start.reply)
            else:
                self._start, self.documents = next(self._starts), self.documents + 1
                self._due.extend((drawn, *self._start.ids))
            return self._due.popleft()
        return drawn


def _written(
    model: Any, starts: Sequence[Start], windows: int, length: int, seed: int, head: int | None, progress: bool
) -> Tensor:
    """So many windows one after the other, int64; ``head``, which is put before each of them later, has its place.

    Args:
        starts: what documents begin with. The first ones of the windows take them in even steps; each later one of a
            window takes the next.
    """
    bar = progress_bar("writing text", "token", total=windows * length, shown=progress)
    first = [at * len(starts) // windows for at in range(windows)]
    writers = [Writer(starts[turn % len(starts)] for turn in count(at)) for at in first]
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(windows, length, generator=generator, dtype=torch.float32)
    size = at_once(model, length)
    with bar, frozen(model), in_training(model), sdpa_kernel(list(ATTENTION)):
        parts = [_drawn(model, writers[at : at + size], numbers[at : at + size], bar) for at in range(0, windows, size)]
    found = torch.cat(parts)
    if (ended := sum(one.documents for one in writers)) > MOST * windows:
        raise TextError(
            f"a dense model whose documents have {windows * length / ended:.1f} tokens",
            "a model that writes text by itself",
            "Name a text, such as wiki-sample.",
        )
    if head is None:
        return found.flatten()
    return torch.cat([row[1:] if int(row[0]) == head else row[:-1] for row in found])


@torch.no_grad()
def _drawn(model: Any, writers: Sequence[Writer], numbers: Tensor, bar: Any) -> Tensor:
    """Their windows, each token drawn by one of ``numbers``; both are ``(windows, tokens)``."""
    ends, columns, drawn = _ends(model), list[Tensor](), [-1] * len(writers)
    cache, device = _cache(model.config, numbers.shape[1]), input_device(model)
    for column in numbers.to(device).unbind(1):
        columns.append(torch.tensor([one.after(token, ends) for one, token in zip(writers, drawn, strict=True)]))
        ids = columns[-1][:, None].to(device)
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
        drawn = tokens_at(logits, column.to(logits.device)).tolist()  # all that a step copies from a GPU
        bar.update(len(writers))
    return torch.stack(columns, 1)


class _Roomy(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values that have room for so many tokens from the first on: nothing is copied as they grow.

    They are held in the dtype in which attention reads them; rotated keys come in float32 where others are autocast.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens = tokens

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        kind = key_states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else key_states.dtype
        new = key_states.to(dtype), value_states.to(dtype)
        if not self.is_initialized:
            self.lazy_initialization(*new)
            self._room = [one.new_empty(*one.shape[:2], self._tokens, one.shape[3]) for one in new]
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        for room, one in zip(self._room, new, strict=True):
            room[:, :, begin:end] = one
        self.keys, self.values = (room[:, :, :end] for room in self._room)
        return self.keys, self.values


def _cache(config: Any, tokens: int) -> DynamicCache:
    """An empty one for so many tokens; layers with a sliding window keep that much alone."""
    cache = DynamicCache(config=config)
    cache.layers = [_Roomy(tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def tokens_at(logits: Tensor, numbers: Tensor) -> Tensor:
    """The tokens at which the cumulated probabilities exceed numbers from 0 to 1, one for each row of logits.

    Where sums are rounded so that a token would result that cannot be, the likeliest takes its place.
    """
    chances = logits.float().softmax(-1)
    sums = chances.cumsum(-1)
    found = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    return torch.where(chances.gather(-1, found) > 0, found, chances.argmax(-1, keepdim=True))[:, 0]


def at_once(model: Any, length: int) -> int:
    """Windows of so many tokens that are written side by side: as many as fit."""
    config, device = model.config, input_device(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * heads * size * length
    cached = numbers * (2 if device.type == "cuda" else model.dtype.itemsize)  # as ``in_training`` has them
    each = cached + COPIES * torch.float32.itemsize * config.vocab_size
    if device.type == "cuda":
        return int(max(1, min(AT_ONCE_GPU, FREE * free_memory(device) // each)))
    return int(max(1, min(AT_ONCE, CACHED // each)))


def _ends(model: Any) -> list[int]:
    """The tokens that end a text."""
    found = model.generation_config.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)
