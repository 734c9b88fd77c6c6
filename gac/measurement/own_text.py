"""Text sampled from the dense model: no data is needed, and no source is overfitted (arXiv 2305.17888).

Calibration text has documents of many kinds, each of which begins with an opening. If there is a chat template, every
fourth begins with everything before a user's first word, and what the user says is then answered (Magpie, arXiv
2406.08464). Text to heal on begins with BOS in one half of the windows and with the chat template in the other. Or
all windows continue pieces of other texts, so that the model is sampled on what matters. Tokens are sampled at
temperature 1 from the whole vocabulary. Each has a random number of its own, so that the batch size does not change
the text. After EOS another document begins in the same window. The text is kept on disk.

A GPU writes ``AT_ONCE`` windows in the time of a few. So it writes more than calibration asks for, and compression
heals on these spare ones, too: no weight was fitted to their tokens.
"""

import hashlib
import json
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, cycle, islice
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
from gac.measurement.openings import OPENINGS
from gac.measurement.store import read_tensors, write_tensors
from gac.measurement.text import SELF, Windows, bos_of, windows_of
from gac.models.attentions import heads_of, of_layer
from gac.models.families import text_config
from gac.models.modules import autocast_dtype, free_memory, frozen, input_device, training_autocast

FOLDER = "own-text"  # in GAC_HOME
WINDOWS = 512  # the default number of windows
MAX_BATCH, MAX_BATCH_GPU = 256, 4096
CPU_BYTES = 2**33
FREE = 0.7  # the share of a GPU's free memory that a batch may take
LOGIT_COPIES = 3  # float32 tensors of the size of the logits in a step: these, the probabilities and their sums
AT_ONCE = 256  # windows that a GPU writes in one batch, those of calibration and spare ones
PIECES = 16  # pieces per window of another text
VERSION = 5  # the version of the sampler: text that another version wrote is not read
MAX_DOCUMENTS = 64  # documents per window above which the model counts as one that writes nothing
MAX_SPECIAL = 0.5  # share of special tokens, likewise
MIN_DISTINCT = 0.2  # share of distinct sequences of four tokens in a window, below which it counts as repetition
PIECE = 256  # tokens of calibration text that a CPU samples one after the other: it is faster with more rows at once
OPENINGS_PER_CHAT = 3  # openings before a start from the chat template
# Not cuDNN's attention, which plans anew for every length.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_MARK = "0f1e2d3c"
_RUN = 4  # tokens of a sequence that may be repeated


@dataclass(frozen=True)
class Start:
    """The tokens that a document begins with, and those between a user's words and the answer, if any."""

    ids: tuple[int, ...]
    reply: tuple[int, ...] = ()


def sampled_windows(
    model: Any,
    tokenizer: Any,
    digest: str,
    seed: int,
    ranks: Ranks,
    show_progress: bool,
    windows: int,
    length: int,
    prompts: Sequence[Windows] | None = None,
    with_bos: bool | None = None,
) -> Windows:
    """Sample windows from the dense model with this ``digest``, or read them from disk.

    Args:
        prompts: windows of other texts, which are continued. If there are none, documents begin with BOS and the chat
            template. None: they begin with openings of many kinds of text.
        with_bos: whether every window begins with BOS, see ``bos_of``.

    Raises:
        TextError: the tokenizer has nothing to begin a text with, or the model writes no text: it ends documents at
            once, repeats itself, or writes special tokens.
    """
    bos = bos_of(tokenizer, with_bos)
    starts = openings(tokenizer, bos) if prompts is None else pieces_of(prompts, bos) or starts_of(tokenizer)
    pieces = max(1, length // PIECE) if prompts is None and input_device(model).type == "cpu" else 1
    spare = _spare(model, windows, length) if prompts is None else 0
    settings = json.dumps([VERSION, digest, windows, length, seed, pieces, spare, [asdict(start) for start in starts]])
    path = home() / FOLDER / f"{hashlib.sha256(settings.encode()).hexdigest()[:40]}.safetensors"
    if not ranks.once(path.exists) and ranks.leads:
        rows = sample(model, starts, windows, length, seed, bos, show_progress, pieces, spare)
        write_tensors(path, {"ids": rows[:windows].flatten(), "spare": rows[windows:].flatten()})
    ranks.once(lambda: None)  # the others wait
    try:
        stored = read_tensors(path, torch.device("cpu"))
        ids, others = stored["ids"], stored["spare"]
    except (FileNotFoundError, KeyError) as failure:
        expected, remedy = "text that the model wrote", "Remove the file, and run the same again."
        raise StatisticsError(f"{path} holds no text", expected, remedy) from failure
    if (flaw := flaw_of(ids.view(windows, -1), ends_of(model), tokenizer.all_special_ids)) is not None:
        problem = f"text 'self' of a dense model that writes none: {flaw}"
        raise TextError(problem, "a model that writes text by itself", "Name a text, such as wiki-sample.")
    text = windows_of(SELF, ids, tokenizer, windows, length, with_bos)
    return replace(text, spare=windows_of(SELF, others, tokenizer, spare, length, with_bos).ids) if spare else text


def _spare(model: Any, windows: int, length: int) -> int:
    """Return the number of further windows that take no more time, which is 0 on a CPU."""
    on_gpu = input_device(model).type == "cuda"
    return max(0, AT_ONCE - windows) if on_gpu and batch_size(model, length) >= AT_ONCE else 0


def flaw_of(ids: Tensor, ends: Sequence[int], special: Sequence[int]) -> str | None:
    """Return why sampled windows ``(windows, tokens)`` are no text; None if they are.

    Args:
        ends: ids that end a document.
        special: ids of all special tokens.
    """
    documents = int(torch.isin(ids, torch.tensor(ends, dtype=ids.dtype)).sum())
    if documents > MAX_DOCUMENTS * len(ids):
        return f"its documents have {ids.numel() / documents:.1f} tokens"
    share = float(torch.isin(ids, torch.tensor(special, dtype=ids.dtype)).double().mean())
    if share > MAX_SPECIAL:
        return f"{share:.0%} of its tokens are special"
    if ids.shape[1] < 2 * _RUN:
        return None
    runs = [row.unfold(0, _RUN, 1) for row in ids]
    distinct = sum(len(row.unique(dim=0)) for row in runs) / sum(map(len, runs))
    return f"{1 - distinct:.0%} of its sequences of four tokens are repeated" if distinct < MIN_DISTINCT else None


def openings(tokenizer: Any, bos: int | None) -> list[Start]:
    """Starts of many kinds of text, each after ``bos`` if there is one, and the chat template between them."""
    prefix = () if bos is None else (bos,)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in OPENINGS]
    starts = [Start((*prefix, *each)) for each in ids if each]
    if not getattr(tokenizer, "chat_template", None):
        return starts
    step, chat = OPENINGS_PER_CHAT, starts_of(tokenizer)[-1]
    return [*chain.from_iterable((*starts[at : at + step], chat) for at in range(0, len(starts), step))]


def starts_of(tokenizer: Any) -> list[Start]:
    """One start for each kind of document: BOS, and the chat template; a TextError if there is neither."""
    starts = [] if tokenizer.bos_token_id is None else [Start((int(tokenizer.bos_token_id),))]
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": _MARK}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, _, after = text.partition(_MARK)
        ids, reply = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
        starts.append(Start(tuple(ids), tuple(reply)))
    starts = [start for start in starts if start.ids]
    if not starts:
        raise TextError(
            f"text 'self' with a {type(tokenizer).__name__} that has neither BOS nor a chat template",
            "something that a text begins with",
            "Name a text, such as wiki-sample.",
        )
    return starts


def pieces_of(texts: Sequence[Windows], bos: int | None) -> list[Start]:
    """Starts that are pieces of the windows of texts, in order, each after ``bos`` if there is one."""
    prefix = () if bos is None else (bos,)
    pieces = []
    for text in texts:
        ids = text.ids[:, 1:] if text.bos == "windows" else text.ids
        size = max(1, ids.shape[1] // PIECES)
        pieces += ids[:, : ids.shape[1] // size * size].reshape(-1, size).tolist()
    return [Start((*prefix, *piece)) for piece in pieces]


class Writer:
    """Writes one window of documents, which begin with ``starts`` in turn."""

    def __init__(self, starts: Iterator[Start]) -> None:
        self._starts, self._start, self._answering = starts, next(starts), False
        self._forced = deque(self._start.ids)

    def next_token(self, sampled: int, ends: Sequence[int]) -> int:
        """The next token after the model sampled this one: that one, unless others are forced."""
        if not self._forced:
            if sampled not in ends:
                return sampled
            self._answering = bool(self._start.reply) and not self._answering
            if self._answering:
                self._forced.extend(self._start.reply)
            else:
                self._start = next(self._starts)
                self._forced.extend((sampled, *self._start.ids))
        return self._forced.popleft()


def sample(
    model: Any,
    starts: Sequence[Start],
    windows: int,
    length: int,
    seed: int,
    bos: int | None,
    show_progress: bool,
    pieces: int = 1,
    spare: int = 0,
) -> Tensor:
    """Sample ``(windows + spare, tokens)``, int64; without the ``bos`` that is put before each window later.

    The ``pieces`` of a window are sampled at once, and lie one after the other; spare windows have one. First documents
    of pieces take ``starts`` in even steps, later ones the next. The other windows do not depend on the spare ones.
    """
    text, count = length - (bos is not None), windows * pieces + spare
    tokens = -(-text // pieces) + (bos is not None)
    bar = progress_bar("writing text", "token", total=count * tokens, shown=show_progress)
    first = [part * len(starts) // parts for parts in (windows * pieces, spare) for part in range(parts)]
    writers = [Writer(islice(cycle(starts), start, None)) for start in first]
    uniform = torch.rand(count, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    size = batch_size(model, tokens)
    with bar, frozen(model), training_autocast(model), sdpa_kernel(ATTENTION), warnings.catch_warnings():
        # Older releases of transformers know no other name.
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        batches = [slice(begin, begin + size) for begin in range(0, count, size)]
        ids = torch.cat([_sample_batch(model, writers[batch], uniform[batch], bar) for batch in batches])
    if bos is not None:
        ids = torch.stack([row[1:] if int(row[0]) == bos else row[:-1] for row in ids])
    return ids.view(windows + spare, -1)[:, :text]


def ends_of(model: Any) -> list[int]:
    """Return the ids that end a document."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


@torch.no_grad()
def _sample_batch(model: Any, writers: Sequence[Writer], uniform: Tensor, bar: Any) -> Tensor:
    """Windows ``(windows, tokens)``, each token sampled with a number of ``uniform`` of the same shape."""
    ends = ends_of(model)
    columns, sampled = list[Tensor](), [-1] * len(writers)
    cache, device = DynamicCache(config=model.config), input_device(model)
    # Layers with a sliding window keep their own caches.
    layers = [_PreallocatedLayer(uniform.shape[1]) if type(each) is DynamicLayer else each for each in cache.layers]
    cache.layers = layers
    for numbers in uniform.to(device).unbind(1):
        pairs = zip(writers, sampled, strict=True)
        columns.append(torch.tensor([writer.next_token(token, ends) for writer, token in pairs]))
        ids = columns[-1][:, None].to(device)
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
        sampled = sample_tokens(logits, numbers.to(logits.device)).tolist()  # the only copy from a GPU in a step
        bar.update(len(writers))
    return torch.stack(columns, 1)


class _PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens = tokens

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        dtype = autocast_dtype(key_states)  # under autocast, rotated keys come in float32
        new = key_states.to(dtype), value_states.to(dtype)
        if not self.is_initialized:
            self.lazy_initialization(*new)
            self._buffers = [states.new_empty(*states.shape[:2], self._tokens, states.shape[3]) for states in new]
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        for buffer, states in zip(self._buffers, new, strict=True):
            buffer[:, :, begin:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values


def sample_tokens(logits: Tensor, uniform: Tensor) -> Tensor:
    """Sample a token for each row of logits: the first at which the cumulative probability exceeds the number.

    If rounded sums would give a token of probability 0, the most probable token takes its place.
    """
    probabilities = logits.float().softmax(-1)
    sums = probabilities.cumsum(-1)
    tokens = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    possible = probabilities.gather(-1, tokens) > 0
    return torch.where(possible, tokens, probabilities.argmax(-1, keepdim=True))[:, 0]


def batch_size(model: Any, length: int) -> int:
    config, device = text_config(model.config), input_device(model)
    gpu = device.type == "cuda"
    numbers = sum(heads_of(of_layer(config, layer)).numbers for layer in range(config.num_hidden_layers)) * length
    cached = numbers * (2 if gpu else model.dtype.itemsize)  # as ``training_autocast`` has them
    window = cached + LOGIT_COPIES * torch.float32.itemsize * config.vocab_size
    memory, most = (FREE * free_memory(device), MAX_BATCH_GPU) if gpu else (CPU_BYTES, MAX_BATCH)
    return int(max(1, min(most, memory // window)))
