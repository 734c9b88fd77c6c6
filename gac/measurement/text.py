"""Calibration and evaluation text: named sources, local files and documents, cut into windows that never overlap."""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch

from gac.core.errors import UNSAFE, ModelError, TextError, did_you_mean
from gac.measurement.documents import DEFAULT_LENGTH, DEFAULT_WINDOWS, Documents, Text, check_characters
from gac.measurement.images import digest_of_examples, holds_messages, read_examples
from gac.measurement.samples import RESERVED, news_sample, python_reference
from gac.measurement.wikipedia import wiki_sample
from gac.models.examples import Example, Examples, TokenWindows, next_tokens
from gac.models.families import text_config

_SIZED = re.compile(r"(.+):([-+.0-9]+)x([-+.0-9]+)", re.DOTALL)
_POSITIVE = re.compile(r"0*[1-9][0-9]{0,8}")
_DOCUMENTS = 2000
"""Documents that are read, from the first on: a shard is 0.8 GB."""
_NAME = 80
"""Characters of a malformed text that an error shows."""

SELF = "self"
"""The name of text that the dense model writes, see ``gac.measurement.own_text``."""

Bos = Literal["none", "text", "windows"]
"""The place of BOS: nowhere, at the head of the text, or at the head of every window."""
_HEADS = {"none": "no BOS", "text": "BOS at the head of the text", "windows": "BOS at the head of every window"}


@dataclass(frozen=True)
class TextSpec:
    """A source of text and how much of it: ``windows`` windows of ``length`` tokens."""

    name: str
    windows: int = DEFAULT_WINDOWS
    length: int = DEFAULT_LENGTH

    @classmethod
    def parse(cls, text: str) -> "TextSpec":
        """Read ``NAME`` or ``NAME:WINDOWSxLENGTH`` (``wiki-sample:16x512``); TextError for other sizes."""
        match = _SIZED.fullmatch(text)
        if match is None:
            source, _, number = text.rpartition(":")
            if number.isdecimal() and is_text(source) and not is_text(text):
                remedy = f"Ask for a positive size, like {source}:64x1024."
                raise TextError(f"text {text!r}", f"{source}, or {source}:WINDOWSxTOKENS", remedy)
            return cls(text)
        name, *size = match.groups()
        if not all(map(_POSITIVE.fullmatch, size)):
            raise _bad_size(f"{size[0]} windows of {size[1]} tokens of {name}")
        return cls(name, int(size[0]), int(size[1]))

    def __str__(self) -> str:
        return f"{self.name}:{self.windows}x{self.length}"


def is_sized_text(item: str) -> bool:
    """True for a known name, or a file, with a size; no document is one."""
    match = _SIZED.fullmatch(item) if "\n" not in item else None
    return match is not None and is_text(match[1])


def is_text(name: str) -> bool:
    return name in (SELF, *_SOURCES) or os.path.isfile(name)


@dataclass(frozen=True, eq=False)
class Windows:
    """Token windows of one text that do not overlap.

    Attributes:
        name: the source's name, or the path it was read from.
        ids: token ids, int64, shape ``(windows, length)``.
        digest: SHA-256 of the token ids.
        start: where the first window begins, in tokens of the text.
        bos: where there is a BOS; at the head of every window it takes the place of one token of text.
        complete: they are all windows of the text.
        texts: where they are of several texts, those of each.
        numbers: of one of these, its places among all.
        spare: token ids of further windows that the model wrote at the same time, if any.
        examples: the windows where some have images.
    """

    name: str
    ids: torch.Tensor
    digest: str
    start: int = 0
    bos: Bos = "none"
    complete: bool = True
    texts: "tuple[Windows, ...]" = ()
    numbers: tuple[int, ...] = ()
    spare: torch.Tensor | None = None
    examples: Examples | None = None

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])

    @property
    def sequences(self) -> TokenWindows:
        """The windows as the model is run on them."""
        return self.ids if self.examples is None else self.examples

    @property
    def head(self) -> str:
        return _HEADS[self.bos]


@dataclass(frozen=True)
class _Source:
    """Origin of a named text.

    Attributes:
        reserved: how many tokens at the head of the one text are for calibration alone; None where calibration and
            evaluation are different texts already.
        length: of an evaluation window unless another is asked for.
        headed: unless a BOS is asked for or refused, the evaluation text is tokenised as the tokenizer does by itself,
            with a BOS at its head where there is one, which is how published perplexities are measured.
    """

    calibration: Callable[[], str]
    evaluation: Callable[[], str]
    reserved: int | None = None
    length: int = DEFAULT_LENGTH
    headed: bool = False


def calibration_windows(
    spec: TextSpec | Documents | str, tokenizer: Any, seed: int = 0, bos: bool | None = None
) -> Windows:
    """The windows that statistics are taken from, out of the source's calibration text.

    Args:
        spec: a known name (``wiki-sample``, ``news-sample``, ``python-reference``, ``wikitext2``, ``c4``, ``chat``,
            ``code``) or a path to a UTF-8 file, and how much of it; a string is read by ``TextSpec.parse``; or
            documents.
        tokenizer: a transformers tokenizer; it adds no other special token than that BOS.
        seed: 0 takes windows in even steps through the whole calibration text; any other draws them, in text order.
        bos: whether every window begins with BOS, see ``bos_of``.

    Raises:
        TextError: an unknown source, one that cannot be read, too few tokens, windows of one token, or no BOS.
    """
    spec = TextSpec.parse(spec) if isinstance(spec, str) else spec
    if spec.length < 2:
        raise TextError(
            f"calibration windows of {spec.length} token", "at least 2: the first is not predicted", "Ask for more."
        )
    source, head = _source(spec.name if isinstance(spec, TextSpec) else spec), bos_of(tokenizer, bos)
    ids = _tokens(source.calibration(), tokenizer)[: source.reserved]
    return _cut(spec.name, ids, spec.windows, spec.length, seed=seed, head=head)


def every_window(source: str | Documents, tokenizer: Any, length: int, bos: bool | None = None) -> Windows:
    """All windows of a source's calibration text, which share no token with those of its evaluation."""
    text, name = _source(source), source if isinstance(source, str) else source.name
    ids = _tokens(text.calibration(), tokenizer)[: text.reserved]
    return _cut(name, ids, None, length, head=bos_of(tokenizer, bos))


def windows_of(
    name: str, ids: torch.Tensor, tokenizer: Any, windows: int, length: int, bos: bool | None = None
) -> Windows:
    return _cut(name, ids, windows, length, head=bos_of(tokenizer, bos))


def bos_of(tokenizer: Any, bos: bool | None = None) -> int | None:
    """The token that every window begins with; None where windows are text alone.

    ``bos=True`` asks for the tokenizer's BOS, which it has to have, and False for none; None has it where the tokenizer
    puts it first by itself (Llama, Gemma, Mistral; not Qwen).
    """
    token = getattr(tokenizer, "bos_token_id", None)
    if bos and token is None:
        problem = f"bos=True with a {type(tokenizer).__name__} without BOS"
        raise TextError(problem, "a tokenizer that has a BOS token", "Leave bos out, or use the model's own tokenizer.")
    if bos is None:
        bos = token is not None and _tokens("x", tokenizer, headed=True)[:1].tolist() == [token]
    return token if bos else None


def evaluation_windows(
    source: str | Documents,
    tokenizer: Any,
    windows: int | None = None,
    length: int | None = None,
    bos: bool | None = None,
    most: int | None = None,
) -> Windows:
    """The windows that perplexity is measured on; those of a named source share no token with calibration.

    ``wikitext2`` is GPTQ's protocol (arXiv 2210.17323), ``c4`` SVD-LLM's (arXiv 2403.07378):
    the documents joined by an empty line, tokenised as one text, and cut into windows of 2048.

    Args:
        source: a known name, or a path to a UTF-8 file, or documents; of the latter two, all is evaluated.
        tokenizer: a transformers tokenizer; it adds its special tokens at the head of ``wikitext2`` and ``c4``, as
            published figures have them, unless ``bos`` is given.
        windows: how many, in even steps through the text; None takes every whole window, or ``most`` of them.
        length: tokens of a window; None takes the source's own, ``window_length(source)``.
        bos: whether every window begins with BOS, see ``bos_of``; None leaves ``wikitext2`` and ``c4`` as published.

    Raises:
        TextError: an unknown source, one that cannot be read, too few tokens, or no BOS.
    """
    text, name = _source(source), source if isinstance(source, str) else source.name
    published = text.headed and bos is None
    head, start = None if published else bos_of(tokenizer, bos), text.reserved or 0
    ids = _tokens(text.evaluation(), tokenizer, published)[start:]
    cut = _cut(name, ids, windows, text.length if length is None else length, "evaluation", start, head=head, most=most)
    return replace(cut, bos="text") if published and int(cut.ids[0, 0]) == tokenizer.bos_token_id else cut


def window_length(text: Text) -> int:
    """Tokens of an evaluation window of a text, unless others are asked for: 2048 for ``wikitext2`` and ``c4``."""
    return _SOURCES[text].length if isinstance(text, str) and text in _SOURCES else DEFAULT_LENGTH


def check_vocabulary(windows: Windows, model: Any) -> None:
    """Refuse token ids that a model's embedding does not have, that of BOS among them."""
    largest, vocabulary = _largest(windows.sequences), model.get_input_embeddings().num_embeddings
    if largest >= vocabulary:
        is_bos = windows.bos != "none" and largest == int(windows.ids[0, 0])
        raise TextError(
            f"the tokenizer gives token id {largest} on {windows.name}{', its BOS' if is_bos else ''}",
            f"ids below the model's vocabulary of {vocabulary}",
            "Use the tokenizer that belongs to the model.",
        )


def _largest(windows: TokenWindows) -> int:
    if isinstance(windows, Examples):  # what stands for an image is not looked up
        return max(int(next_tokens(example).max()) for example in windows)
    return int(windows.max())


def _bad_size(size: str) -> TextError:
    expected = "at least 1 window of at least 1 token, in whole numbers"
    return TextError(size, expected, "Ask for a positive size, like wiki-sample:64x1024.")


def example_windows(
    path: str,
    processor: Any,
    config: Any,
    windows: int | None,
    length: int | None,
    seed: int = 0,
    bos: bool | None = None,
) -> Windows:
    """Windows of chat messages with images, see ``gac.measurement.images``, whose BOS is where their template puts it.

    ``bos`` is asked for with other texts, whose windows are recorded to begin with it or not, and these as they.
    """
    examples, complete = read_examples(path, processor, config, windows, length, seed)
    head: Bos = "none" if bos_of(processor.tokenizer, bos) is None else "windows"
    every = Examples(tuple(examples))
    return Windows(path, every.ids, digest_of_examples(examples), bos=head, complete=complete, examples=every)


def as_examples(windows: Windows) -> tuple[Example, ...]:
    if windows.examples is not None:
        return windows.examples.windows
    return tuple(Example(ids, {}, len(ids), torch.ones_like(ids, dtype=torch.bool)) for ids in windows.ids)


def _tokens(text: str, tokenizer: Any, headed: bool = False) -> torch.Tensor:
    """Token ids, int64, shape ``(tokens,)``, without BOS unless ``headed``."""
    return _encoded(text, tokenizer, headed, len(tokenizer))


@lru_cache(maxsize=4)  # calibration, healing and evaluation cut the same few texts
def _encoded(text: str, tokenizer: Any, headed: bool, _vocabulary: int) -> torch.Tensor:
    encoded = tokenizer(text, add_special_tokens=headed, return_attention_mask=False, verbose=False)
    return torch.tensor(encoded["input_ids"], dtype=torch.int64)


def _cut(
    name: str,
    ids: torch.Tensor,
    windows: int | None,
    length: int,
    purpose: str = "calibration",
    start: int = 0,
    seed: int = 0,
    head: int | None = None,
    most: int | None = None,
) -> Windows:
    """Cut full windows: as many as asked for, else all, or ``most`` of them.

    With a ``head``, each is that token and ``length - 1`` of text.
    ``seed`` 0 takes them in even steps through the text; any other draws them.
    """
    step = length if head is None else length - 1
    if step < 1 or (windows is not None and windows < 1):
        raise _bad_size(f"{windows} windows of {step} tokens")
    needed, count = (windows or 1) * step, len(ids) // step
    if needed > len(ids):
        most = len(ids) + length - step
        longest = f"windows of at most {most} tokens" if most > 1 else "more"
        smaller = f"at most {count} windows of {length}" if count else longest
        raise TextError(
            f"{name} has {len(ids):,} tokens for {purpose}",
            f"at least {needed:,}, for {windows or 1} x {length}{'' if head is None else ' with BOS'}",
            f"Ask for {smaller}, or use a longer text.",
        )
    windows = windows or min(count, most or count)
    drawn = np.arange(windows) * count // windows
    if seed:
        drawn = np.sort(np.random.default_rng(seed).choice(count, windows, replace=False))
    taken = ids[: count * step].view(-1, step)[torch.from_numpy(drawn)]
    if head is not None:
        taken = torch.cat([taken.new_full((len(taken), 1), head), taken], dim=1)
    return Windows(name, taken, digest_of(taken), start, "none" if head is None else "windows", windows == count)


def digest_of(ids: torch.Tensor) -> str:
    return hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()


def _source(text: str | Documents) -> _Source:
    if isinstance(text, Documents):
        read = partial(getattr, text, "text")
    else:
        check_text(text)
        if text in _SOURCES:
            return _SOURCES[text]
        read = partial(_local, text)
    return _Source(read, read)


def check_text(name: str, sampled: bool = False) -> None:
    """Refuse a text that is neither known nor a file, or a name that is not UTF-8, which no plan can hold.

    Text that the dense model writes is refused too, unless it may be ``sampled``.
    """
    check_characters(name, f"the name of text {name[:_NAME]!a}", "Rename the file.")
    if name == SELF and not sampled:
        expected, remedy = "text that others wrote", "Calibrate or heal on it, and name another text here."
        raise TextError(f"text {SELF!r}, which the dense model writes", expected, remedy)
    if is_text(name):
        if UNSAFE.search(name):
            raise TextError(f"text {name!r}", "a name without control characters", "Rename the file.")
        return
    shown, remedy = repr(name), did_you_mean(name, _SOURCES, "Check the name or the path.")
    if len(name) > _NAME:
        shown = f"{name[:_NAME]!r} and {len(name) - _NAME:,} characters more"
        remedy = "Pass documents as gac.Documents([...])."
    raise TextError(f"text {shown} is neither known nor a file", f"one of {', '.join(_SOURCES)}, or a path", remedy)


def _local(path: str) -> str:
    if holds_messages(path):
        expected = "text; messages with images are for calibration and perplexity of multimodal models"
        raise TextError(f"file {path} of chat messages", expected, "Name another text here.")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as failure:
        raise TextError(
            f"text file {path} cannot be read: {failure}", "a readable UTF-8 file", "Check the file and its encoding."
        ) from failure
    check_characters(text, f"text file {path}")
    return text


def _joined(
    dataset: str, split: str, read: Callable[[Any], str] = itemgetter("text"), most: int | None = None, **options: Any
) -> str:
    import datasets

    try:
        rows = datasets.load_dataset(dataset, split=split, **options)
        return "\n\n".join(map(read, islice(rows, most)))
    except OSError as failure:
        raise TextError(
            f"data set {dataset} ({split}) cannot be fetched: {failure}",
            "a network, or a copy in the cache of datasets",
            "Use wiki-sample or a local file, which need no network.",
        ) from failure


def _conversation(row: Any) -> str:
    return "\n\n".join(message["content"] for message in row["messages"])


_published = partial(_Source, length=2048, headed=True)
_wikitext2 = partial(_joined, "Salesforce/wikitext", name="wikitext-2-raw-v1")
_streamed = partial(_joined, most=_DOCUMENTS, streaming=True)
_c4 = partial(_streamed, "allenai/c4")
_chat = partial(_streamed, "HuggingFaceH4/ultrachat_200k", read=_conversation)
_code = partial(_streamed, split="train", read=itemgetter("content"))

_SOURCES: Mapping[str, _Source] = MappingProxyType(
    {
        "wiki-sample": _Source(wiki_sample, wiki_sample, reserved=200 * 1024),
        "news-sample": _Source(news_sample, news_sample, reserved=RESERVED),
        "python-reference": _Source(python_reference, python_reference, reserved=RESERVED),
        "wikitext2": _published(partial(_wikitext2, "train"), partial(_wikitext2, "test")),
        "c4": _published(
            partial(_c4, "train", data_files={"train": "en/c4-train.00000-of-01024.json.gz"}),
            partial(_c4, "validation", data_files={"validation": "en/c4-validation.00000-of-00008.json.gz"}),
        ),
        "chat": _Source(partial(_chat, "train_sft"), partial(_chat, "test_sft")),
        "code": _Source(
            partial(_code, "codeparrot/codeparrot-clean-train"), partial(_code, "codeparrot/codeparrot-clean-valid")
        ),
    }
)


def text_names() -> tuple[str, ...]:
    return tuple(_SOURCES)


def check_positions(model: Any, length: int, what: str) -> None:
    """Refuse sequences that are longer than the model has positions for; ``what`` is their name in the error."""
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ModelError(
            f"{what} of {length:,} tokens for a model of {positions:,} positions",
            f"{what} that the model can read",
            f"Ask for a length of at most {positions:,}.",
        )
