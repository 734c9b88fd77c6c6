"""Counts that cannot be are refused at once, by name."""

import math
from collections.abc import Callable
from typing import Any

import pytest

import gac
from gac.core.errors import GacError
from gac.healing.records import BLOCKS, TrainingBudget
from gac.measurement.documents import Documents
from tests.models.small import small_config, small_model

MODEL = small_model(small_config("llama"))


COUNTS: dict[str, Callable[[Any], Any]] = {
    "Documents.windows": lambda count: Documents(["text"], windows=count),
    "Documents.length": lambda count: Documents(["text"], length=count),
    "evaluate.windows": lambda count: gac.evaluate(MODEL, windows=count),
    "evaluate.length": lambda count: gac.evaluate(MODEL, length=count),
    "evaluate.batch": lambda count: gac.evaluate(MODEL, batch=count),
    "evaluate.limit": lambda count: gac.evaluate(MODEL, tasks="none", limit=count),
    "heal.tokens": lambda count: gac.heal(MODEL, against=MODEL, tokens=count),
    "allocate_tokens.following": lambda count: gac.allocate_tokens(MODEL, following=count),
    "allocate_tokens.step": lambda count: gac.allocate_tokens(MODEL, step=count),
    "frontier.points": lambda count: gac.frontier(MODEL, points=count),
    "Recipe.shots": lambda count: gac.Recipe.of(0.8, shots=count),
}


@pytest.mark.parametrize("count", [0, -1, 10**40, True, 1.5, math.nan, math.inf, "1"], ids=str)
@pytest.mark.parametrize("option", COUNTS)
def test_impossible_counts(option: str, count: Any) -> None:
    name = option.partition(".")[2]
    with pytest.raises(GacError, match=rf"{name}={count!r}|{count} {name}"):
        COUNTS[option](count)


@pytest.mark.parametrize("count", [-1, 10**40, True, 1.5])
def test_impossible_examples(count: Any) -> None:
    with pytest.raises(GacError, match=f"num_fewshot={count}"):
        gac.evaluate(MODEL, tasks="none", num_fewshot=count)


@pytest.mark.parametrize("option", ["seed", "align", "tensor_parallel"])
def test_numbers_that_no_plan_file_holds(option: str) -> None:
    gac.Recipe.of(0.8, **{option: 2**62})
    for number in (-1, 2**62 + 1, 10**40):
        with pytest.raises(GacError, match=f"{option}={number}; expected"):
            gac.Recipe.of(0.8, **{option: number})


@pytest.mark.parametrize("count", [0, -1, 10**40, math.nan, math.inf])
def test_impossible_minutes(count: float) -> None:
    with pytest.raises(GacError, match=r"minutes=.*; expected minutes above 0, a year at most"):
        TrainingBudget(count, None, 1e-3, BLOCKS, False, 0.0, 0)
