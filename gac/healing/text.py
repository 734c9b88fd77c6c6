"""What a model is healed on: windows of one text or several to train on, and some that are held out."""

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
from gac.healing.own_text import SELF, WINDOWS
from gac.measurement.documents import DEFAULT_LENGTH, Documents, ordered
from gac.measurement.text import (
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

LEAST = 10
"""Windows that a text has to have."""
HELD, MOST_HELD = 10, 16
"""One of so many windows is held out, and so many at most."""

Written = Callable[[int, int, Sequence[Windows]], Windows]
"""So many windows of so many tokens that the dense model writes itself, beside those of other texts."""
_OWN = re.compile(rf"{SELF}(:\S+)?")


@dataclass(frozen=True, eq=False)
class HealingText:
    """Windows of token ids, int64 ``(windows, tokens)``.

    Attributes:
        names: of the texts, as the plan calls them, and ``gac heal`` takes.
        train: to train on.
        read: which of these are read in a turn, ``(count,)``: those of small texts several times.
        held: in even steps among them, never trained on.
        given, held_given: 1.0 for each window of a text that was given, 0.0 for each that the dense model wrote.
        bos: whether every window begins with BOS.
        documents: the digests of those that were given in memory.
    """

    names: tuple[str, ...]
    train: Tensor
    read: Tensor
    held: Tensor
    given: Tensor
    held_given: Tensor
    bos: bool
    documents: tuple[str, ...] = ()

    def drawn(self, first: int, count: int, seed: int) -> Tensor:
        """Which so many windows are trained on from a place on in an endless sequence, ``(count,)``.

        All come in another order each turn.
        """
        places = (divmod(at, len(self.read)) for at in range(first, first + count))
        found = [int(self.read[order(len(self.read), seed, turn)[at]]) for turn, at in places]
        return torch.tensor(found, dtype=torch.long)


def healing_text(
    given: CalibrationText | None, plan: Plan, loaded: Loaded, written: Written, labels: bool = False
) -> HealingText:
    """The texts that were asked for: all of their calibration parts, or as many windows as their names say.

    Args:
        given: one text or a list of them, in which strings that are no texts are documents; ``self`` or
            ``self:WINDOWSxLENGTH`` is what the model writes. None takes the plan's calibration text.
        loaded: the dense model.
        labels: whether tokens of the text itself are learned, which what the model writes does not have.

    Raises:
        TextError: a text cannot be read or is there twice, their windows differ in length, or are too few; or all of
            it is written by the model, and labels are asked for.
        ModelError: windows are longer than the model has positions for.
        PlanError: the plan's text was given in memory.
    """
    planned = plan.measured.calibration
    asked = _asked(given, plan)
    if labels and all(one.part.name == SELF for one in asked):
        raise TextError(
            f"labels with text {asked[0].name!r} alone, which the dense model writes",
            "a text whose own tokens can be learned",
            "Name another text beside it, such as wiki-sample, or leave the labels out.",
        )
    texts = Texts(tuple(one.part for one in asked))  # refuses what does not go together, before anything is written
    begins = planned.bos if plan.measured.predicted else None
    cut = [one.cut(loaded.tokenizer, begins) for one in asked]
    embedding: Any = loaded.model.get_input_embeddings()
    for windows in cut:
        if windows is not None:
            check_vocabulary(windows, embedding.num_embeddings)
    counts = [wanted.part.windows if one is None else len(one) for one, wanted in zip(cut, asked, strict=True)]
    names, length = tuple(one.name for one in asked), asked[0].part.length
    check_positions(loaded.model, length, "windows")
    out = held_out(" and ".join(names), counts, length)
    kept = zip(cut, torch.split(~out, counts), strict=True)
    beside = [replace(one, ids=one.ids[rows]) for one, rows in kept if one is not None]
    whole = [written(at, length, beside) if one is None else one for one, at in zip(cut, counts, strict=True)]
    ids = torch.cat([one.ids for one in whole])
    of_text = torch.arange(len(whole)).repeat_interleave(torch.tensor(counts))
    bos = all(one.bos == "windows" for one in whole)
    there = torch.tensor([one is not None for one in cut]).float()[of_text]
    read = in_a_turn(of_text[~out])
    return HealingText(names, ids[~out], read, ids[out], there[~out], there[out], bos, texts.documents)


def in_a_turn(of_text: Tensor) -> Tensor:
    """Which windows are read in a turn, by the number of the text that each is of, ``(windows,)``.

    A text has a share in proportion to the root of how many windows it has (arXiv 1901.07291, section 3.1, with
    alpha = 0.5), as nearly as whole numbers of turns allow. So little text of the kind that matters is not lost in much
    that the model writes.

    >>> in_a_turn(torch.tensor([0, 1, 1, 1, 1])).tolist()
    [0, 0, 1, 2, 3, 4]
    """
    counts = of_text.bincount()
    times = (counts.max() / counts.float()).sqrt().round().long()
    return torch.arange(len(of_text)).repeat_interleave(times[of_text])


def check_names(names: Iterable[str]) -> None:
    """Refuse names that no text to heal on has.

    Raises:
        TextError: one is neither ``self`` nor known nor a file, or its size is none.
    """
    for name in names:
        _Asked.named(name, DEFAULT_LENGTH)


def held_out(name: str, counts: Sequence[int], length: int) -> Tensor:
    """Which of so many windows of each text, of so many tokens, are held out, ``(windows,)``: in even steps.

    Texts have the shares that they have in training, and at least one window each, but never more than half of theirs.

    Args:
        name: what an error calls the texts.

    Raises:
        TextError: there are too few windows.
    """
    windows = sum(counts)
    if windows < LEAST:
        raise TextError(
            f"{name} has {windows} windows of {length} tokens to heal on",
            f"at least {LEAST}, some of which are held out",
            "Use a longer text, shorter windows, or text='self', which the dense model writes.",
        )
    shares = [sqrt(count) / sum(map(sqrt, counts)) for count in counts]
    held = [
        min(max(1, round(share * min(MOST_HELD, windows // HELD))), n // 2)
        for share, n in zip(shares, counts, strict=True)
    ]
    return torch.cat([_even_steps(count, n) for count, n in zip(held, counts, strict=True)])


def _even_steps(count: int, windows: int) -> Tensor:
    """So many of the windows, ``(windows,)``."""
    out = torch.zeros(windows, dtype=torch.bool)
    if count:
        out[torch.arange(count) * windows // count + windows // (2 * count)] = True
    return out


@cache
def order(count: int, seed: int, turn: int) -> Tensor:
    """A permutation of so many windows, another one each turn."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 * seed + turn))


@dataclass(frozen=True)
class _Asked:
    """One text that is asked for.

    Attributes:
        name: what the plan calls it.
        part: the text, and the size of its windows.
        whole: whether all of its calibration part is meant, and not as many windows as ``part`` says.
    """

    name: str
    part: Part
    whole: bool = False

    @classmethod
    def of(cls, item: str | Part, length: int) -> "_Asked":
        """A text as a caller has it; its windows have so many tokens where it does not say how many.

        Raises:
            TextError: a name is neither ``self`` nor known nor a file, or its size is none.
        """
        if isinstance(item, str):
            return cls.named(item, length)
        return cls(item.name, item, whole=True) if isinstance(item, Documents) else cls(str(item), item)

    @classmethod
    def named(cls, name: str, length: int) -> "_Asked":
        """``NAME``, ``NAME:WINDOWSxLENGTH``, a path, or ``self``; else as ``of``."""
        if name == SELF:
            return cls(name, TextSpec(SELF, WINDOWS, length))
        sized = is_sized_text(name) or _OWN.fullmatch(name) is not None
        spec = TextSpec.parse(name) if sized else TextSpec(name, length=length)
        if spec.name != SELF:
            check_text(spec.name)
        return cls(name, spec, whole=not sized)

    def cut(self, tokenizer: Any, bos: bool | None) -> Windows | None:
        """Its windows, None of what is to be written; ``bos`` says for a text without a size whether they begin so."""
        part = self.part
        if isinstance(part, Documents):
            return every_window(part, tokenizer, part.length)
        if part.name == SELF:
            return None
        if self.whole:
            return every_window(part.name, tokenizer, part.length, bos)
        return calibration_windows(part, tokenizer)


def _asked(given: CalibrationText | None, plan: Plan) -> list[_Asked]:
    """Each text that is asked for; without one those of the plan."""
    planned = plan.measured.calibration
    length = planned.window_tokens or DEFAULT_LENGTH
    if given is not None:
        items = _items(given, length)
    elif planned.documents:
        raise PlanError(
            f"a plan calibrated on {planned.text}", "a text to heal on", "Pass one: gac.heal(..., text=documents)."
        )
    else:
        items = tuple(one.text for one in planned.texts) if plan.measured.predicted else ("wiki-sample",)
    return [_Asked.of(item, length) for item in items]


def _items(given: CalibrationText, length: int) -> tuple[str | Part, ...]:
    """Each text of a list in which one is named, with or without a size; of any other, what ``Texts.of`` has.

    Documents that do not say how they are packed are cut into windows of so many tokens.
    """
    if isinstance(given, (str, PathLike)):
        return (str(given),)
    if not isinstance(given, Iterable):
        return Texts.of(given).parts
    items = tuple(str(one) if isinstance(one, PathLike) else one for one in ordered(given))
    if any(map(_is_named, items)):
        return items
    if any(isinstance(one, (TextSpec, Documents)) for one in items):
        return Texts.of(items).parts
    return (Documents(items, length=length),)


def _is_named(item: object) -> bool:
    return isinstance(item, str) and (_OWN.fullmatch(item) is not None or is_text(item) or is_sized_text(item))
