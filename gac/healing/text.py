"""The text of a distillation run: windows of one text or several to train on, and held-out windows."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from gac.core.errors import PlanError, TextError
from gac.measurement.documents import DEFAULT_LENGTH, Documents, ordered
from gac.measurement.images import holds_messages
from gac.measurement.own_text import WINDOWS
from gac.measurement.text import (
    SELF,
    TextSpec,
    Windows,
    calibration_windows,
    check_positions,
    check_text,
    check_vocabulary,
    every_window,
    is_sized_text,
    is_text,
)
from gac.measurement.texts import CalibrationText, Part, Texts
from gac.models.loading import Loaded
from gac.plan.plan import Plan

MIN_WINDOWS = 10
HELDOUT_EVERY, MAX_HELDOUT = 10, 16  # one of so many windows is held out, up to a maximum

_SELF = re.compile(rf"{SELF}(:\S+)?")

PromptedSampler = Callable[[int, int, Sequence[Windows]], Windows]
"""Samples so many windows of so many tokens from the dense model, after those of other texts."""


@dataclass(frozen=True, eq=False)
class HealingText:
    """Windows of token ids, int64 ``(windows, tokens)``."""

    names: tuple[str, ...]  # of the texts, as the plan and ``gac heal`` call them
    train: Tensor  # training windows
    epoch: Tensor  # indices of the windows of one epoch; those of small texts occur several times
    heldout: Tensor  # held-out windows
    labelled: Tensor  # 1.0 for each training window of a given text, 0.0 for each that the dense model wrote
    heldout_labelled: Tensor
    bos: bool  # True if every window begins with BOS
    documents: tuple[str, ...] = ()  # digests of the texts given in memory

    def batch(self, first: int, count: int, seed: int) -> Tensor:
        """Indices ``(count,)`` of training windows, from number ``first`` on; every epoch has another order."""
        places = (divmod(number, len(self.epoch)) for number in range(first, first + count))
        indices = [int(self.epoch[shuffled(len(self.epoch), seed, epoch)[place]]) for epoch, place in places]
        return torch.tensor(indices, dtype=torch.long)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def healing_text(
    text: CalibrationText | None, plan: Plan, loaded: Loaded, sample: PromptedSampler, labels: bool = False
) -> HealingText:
    """Cut texts into windows: all of their calibration parts, or as many windows as their names say.

    Strings of a list that name no text are documents, and ``self`` or ``self:WINDOWSxLENGTH`` is text that the dense
    model writes; None is the plan's calibration text. ``labels`` needs other text than that of the dense model. A
    GacError says if a text cannot be read or used with this model, or if the plan's text was given in memory.
    """
    requests = _requests(text, plan)
    if labels and all(request.part.name == SELF for request in requests):
        raise TextError(
            f"labels with text {requests[0].name!r} alone, which the dense model writes",
            "a text whose own tokens can be learned",
            "Name another text too, such as wiki-sample, or leave the labels out.",
        )
    texts = Texts(tuple(request.part for request in requests))  # checks them before anything is sampled
    bos = plan.measured.calibration.bos if plan.measured.predicted else None
    cut = [request.cut(loaded.tokenizer, bos) for request in requests]
    for windows in filter(None, cut):
        check_vocabulary(windows, loaded.model)
    pairs = zip(cut, requests, strict=True)
    counts = [request.part.windows if windows is None else len(windows) for windows, request in pairs]
    names, length = tuple(request.name for request in requests), requests[0].part.length
    check_positions(loaded.model, length, "windows")
    out = held_out(" and ".join(names), counts, length)
    parts = [*zip(cut, counts, torch.split(~out, counts), strict=True)]
    prompts = [replace(windows, ids=windows.ids[mask]) for windows, _, mask in parts if windows is not None]
    complete = [sample(count, length, prompts) if windows is None else windows for windows, count, _ in parts]
    return _joined(names, complete, [windows is not None for windows in cut], out, texts.documents)


def calibrated_text(windows: Windows, loaded: Loaded, bos: bool | None, documents: tuple[str, ...]) -> HealingText:
    """All windows of the texts that ``windows`` are of; text that the model wrote comes with its spare windows.

    Of documents these are only the ``windows`` themselves. A TextError says if they are too few.
    """
    parts = [part for part in windows.texts or (windows,) if part.examples is None]
    if not parts:
        remedy = "Heal later, on a text: gac.heal(..., text='wiki-sample')."
        raise TextError(f"{windows.name}, with images, to heal on", "text alone", remedy)
    complete = [
        every_window(part.name, loaded.tokenizer, windows.length, bos)
        if part.name != SELF and is_text(part.name)
        else _with_spare(part)
        for part in parts
    ]
    out = held_out(windows.name, [len(part) for part in complete], windows.length)
    return _joined([part.name for part in parts], complete, [part.name != SELF for part in parts], out, documents)


def _with_spare(windows: Windows) -> Windows:
    return windows if windows.spare is None else replace(windows, ids=torch.cat([windows.ids, windows.spare]))


def _joined(
    names: Sequence[str],
    texts: Sequence[Windows],
    labelled: Sequence[bool],
    out: Tensor,
    documents: tuple[str, ...],
) -> HealingText:
    """Windows of all texts, those of ``out`` held out; the tokens of ``labelled`` ones can be learned."""
    ids = torch.cat([windows.ids for windows in texts])
    text_of_window = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(windows) for windows in texts]))
    labels = torch.tensor(labelled).float()[text_of_window]
    return HealingText(
        tuple(names),
        ids[~out],
        epoch_indices(text_of_window[~out]),
        ids[out],
        labels[~out],
        labels[out],
        all(windows.bos == "windows" for windows in texts),
        documents,
    )


def epoch_indices(text_of_window: Tensor) -> Tensor:
    """Indices of the windows of one epoch, from the number of the text of each, ``(windows,)``.

    The share of a text is proportional to the square root of its size (arXiv 1901.07291, section 3.1, alpha = 0.5), as
    nearly as repeating windows allows.

    >>> epoch_indices(torch.tensor([0, 1, 1, 1, 1])).tolist()
    [0, 0, 1, 2, 3, 4]
    """
    counts = text_of_window.bincount()
    repeats = (counts.max() / counts.float()).sqrt().round().long()
    return torch.arange(len(text_of_window)).repeat_interleave(repeats[text_of_window])


def check_names(names: Iterable[str]) -> None:
    """Raise a TextError if a name is neither ``self`` nor known nor a file, or if its size is malformed."""
    for name in names:
        _Request.parse(name, DEFAULT_LENGTH)


def held_out(name: str, counts: Sequence[int], length: int) -> Tensor:
    """A mask ``(windows,)`` of the held-out windows of texts with so many windows each, evenly spaced.

    Texts have the same shares as in training, at least one window each, and at most half of theirs. A TextError says
    if there are too few windows.
    """
    windows = sum(counts)
    if windows < MIN_WINDOWS:
        raise TextError(
            f"{name} has {windows} windows of {length} tokens to heal on",
            f"at least {MIN_WINDOWS}, some of which are held out",
            "Use a longer text, shorter windows, or text='self', which the dense model writes.",
        )
    total, roots = min(MAX_HELDOUT, windows // HELDOUT_EVERY), sum(map(sqrt, counts))
    heldout = torch.zeros(windows, dtype=torch.bool)
    for count, part in zip(counts, torch.split(heldout, list(counts)), strict=True):
        taken = min(max(1, round(sqrt(count) / roots * total)), count // 2)
        if taken:
            part[torch.arange(taken) * count // taken + count // (2 * taken)] = True
    return heldout


@cache
def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


@dataclass(frozen=True)
class _Request:
    """A text to heal on, by the name in the plan; ``complete`` means its full calibration part."""

    name: str
    part: Part
    complete: bool = False

    @classmethod
    def parse(cls, item: str | Part, length: int) -> "_Request":
        """Parse a text, with windows of ``length`` tokens unless it has a size; errors as for ``check_names``."""
        if not isinstance(item, str):
            return cls(item.name, item) if isinstance(item, Documents) else cls(str(item), item)
        if item == SELF:
            return cls(item, TextSpec(SELF, WINDOWS, length))
        sized = is_sized_text(item) or _SELF.fullmatch(item) is not None
        spec = TextSpec.parse(item) if sized else TextSpec(item, length=length)
        check_text(spec.name, sampled=True)
        return cls(item, spec, complete=not sized)

    def cut(self, tokenizer: Any, bos: bool | None) -> Windows | None:
        """The windows, or None if they are to be sampled; ``bos`` applies to a text without a size."""
        part = self.part
        if isinstance(part, Documents):
            return every_window(part, tokenizer, part.length)
        if part.name == SELF:
            return None
        if self.complete:
            return every_window(part.name, tokenizer, part.length, bos)
        return calibration_windows(part, tokenizer)


def _requests(text: CalibrationText | None, plan: Plan) -> list[_Request]:
    planned = plan.measured.calibration
    length = planned.window_tokens or DEFAULT_LENGTH
    if text is not None:
        items = split_texts(text, length)
    elif planned.documents:
        remedy = "Pass one: gac.heal(..., text=documents)."
        raise PlanError(f"a plan calibrated on {planned.text}", "a text to heal on", remedy)
    else:
        items = (
            tuple(part.text for part in planned.texts if part.text != SELF and not holds_messages(part.text))
            if plan.measured.predicted
            else ()
        )
        items = items or ("wiki-sample",)
    return [_Request.parse(item, length) for item in items]


def split_texts(text: CalibrationText, length: int) -> tuple[str | Part, ...]:
    """The items of a list if one of them names a text, else the parts as ``Texts.of``, or documents of this length."""
    if isinstance(text, (str, PathLike)):
        return (str(text),)
    if not isinstance(text, Iterable):
        return Texts.of(text).parts
    items = tuple(str(item) if isinstance(item, PathLike) else item for item in ordered(text))
    if any(isinstance(item, str) and (_SELF.fullmatch(item) or is_text(item) or is_sized_text(item)) for item in items):
        return items
    if any(isinstance(item, (TextSpec, Documents)) for item in items):
        return Texts.of(items).parts
    return (Documents(items, length=length),)
