"""What a model is healed on: windows to train on, and some that are held out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gac.errors import PlanError, TextError
from gac.healing.own_text import SELF, WINDOWS
from gac.models.loading import Loaded
from gac.plan import Plan
from gac.sensitivity.documents import DEFAULT_LENGTH, Documents
from gac.sensitivity.text import (
    TextSpec,
    Windows,
    calibration_windows,
    check_vocabulary,
    every_window,
    is_sized_text,
)
from gac.sensitivity.texts import CalibrationText, Texts

LEAST = 10
"""Windows that a text has to have."""
HELD, MOST_HELD = 10, 16
"""One of so many windows is held out, and so many at most."""

Written = Callable[[int, int], Windows]
"""So many windows of so many tokens that the dense model writes itself."""


@dataclass(frozen=True, eq=False)
class HealingText:
    """Windows of token ids, int64 ``(windows, tokens)``.

    Attributes:
        name: what the plan calls them, and ``gac heal`` takes.
        train: to train on.
        held: in even steps among them, never trained on.
        bos: whether every window begins with BOS.
        documents: the digests of those that were given in memory.
    """

    name: str
    train: Tensor
    held: Tensor
    bos: bool
    documents: tuple[str, ...] = ()


def healing_text(given: CalibrationText | None, plan: Plan, loaded: Loaded, written: Written) -> HealingText:
    """The text that was asked for: all of its calibration part, or as many windows as its name says.

    Args:
        given: None takes the plan's calibration text; ``self`` or ``self:WINDOWSxLENGTH`` what the model writes.
        loaded: the dense model.

    Raises:
        TextError: the text cannot be read, or is too short.
        PlanError: the plan's text was given in memory.
    """
    name, cut, documents = _windows(given, plan, loaded.tokenizer, written)
    for one in cut:
        embedding: Any = loaded.model.get_input_embeddings()
        check_vocabulary(one, embedding.num_embeddings)
    train, held = parted(name, torch.cat([one.ids for one in cut]))
    return HealingText(name, train, held, cut[0].bos == "windows", documents)


def parted(name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Windows ``(windows, tokens)`` to train on, and those of them that are held out, in even steps.

    Args:
        name: what an error calls the text.

    Raises:
        TextError: there are too few.
    """
    if len(ids) < LEAST:
        raise TextError(
            f"{name} has {len(ids)} windows of {ids.shape[1]} tokens to heal on",
            f"at least {LEAST}, some of which are held out",
            "Use a longer text, shorter windows, or text='self', which the dense model writes.",
        )
    held = min(MOST_HELD, len(ids) // HELD)
    out = torch.zeros(len(ids), dtype=torch.bool)
    out[torch.arange(held) * len(ids) // held + len(ids) // (2 * held)] = True
    return ids[~out], ids[out]


@cache
def order(count: int, seed: int, turn: int) -> Tensor:
    """A permutation of so many windows, another one each turn."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 * seed + turn))


def _windows(
    given: CalibrationText | None, plan: Plan, tokenizer: Any, written: Written
) -> tuple[str, list[Windows], tuple[str, ...]]:
    """The name of a text, its windows, and the digests of its documents."""
    planned = plan.measured.calibration
    length = planned.window_tokens or DEFAULT_LENGTH
    bos = planned.bos if plan.measured.predicted else None
    if given is None:
        if planned.documents:
            raise PlanError(
                f"a plan calibrated on {planned.text}", "a text to heal on", "Pass one: gac.heal(..., text=documents)."
            )
        names = [one.text for one in planned.texts] if plan.measured.predicted else ["wiki-sample"]
        return " and ".join(names), [every_window(one, tokenizer, length, bos) for one in names], ()
    if isinstance(given, str) and (given == SELF or given.startswith(f"{SELF}:")):
        size = TextSpec.parse(given) if given != SELF else TextSpec(SELF, WINDOWS, length)
        return given, [written(size.windows, size.length)], ()
    if isinstance(given, str) and not is_sized_text(given):
        return given, [every_window(given, tokenizer, length, bos)], ()
    texts = Texts.of(given)
    cut = [
        every_window(one, tokenizer, one.length) if isinstance(one, Documents) else calibration_windows(one, tokenizer)
        for one in texts.parts
    ]
    return given if isinstance(given, str) else texts.name, cut, texts.documents
