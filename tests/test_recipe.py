"""A recipe: what it refuses, what is written of it, and that the record and the keywords ask for the same."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gac
from gac.allocation.resolve import SLACK
from gac.core.errors import BudgetError, GacError
from gac.plan.recipe import Deployment, Limits, Measure, Recipe, Space
from tests.changed import edited
from tests.cli.commands import run
from tests.small_pipeline import Small

DOCS = Path(gac.__file__).parents[1] / "docs"


def test_keywords_are_fields(tmp_path: Path) -> None:
    found = Recipe.of(
        0.7, method="svd", calibration="c4:8x64", align="profile,group=128", latency=0.9, fuse="auto", profile=Path("a")
    )
    assert found == Recipe(
        Measure("svd", "c4:8x64"),
        Space(align=128),
        Deployment(profile="a", fuse="auto"),
        Limits(0.7, latency={"prefill:1x1024": 0.9, "decode:1@1024": 0.9}),
    )
    one, several = Recipe.of(calibration=["c4:2x8"]), Recipe.of(calibration=["c4:2x8", "a.txt:1x8"])
    assert (one.measure.text, several.measure.text) == ("c4:2x8", ("c4:2x8", "a.txt:1x8"))
    several.save(tmp_path / "recipe.json")
    assert json.loads((tmp_path / "recipe.json").read_text())["measure"]["text"] == ["c4:2x8", "a.txt:1x8"]
    assert Recipe.load(tmp_path / "recipe.json") == several
    assert (Limits().params, Limits(memory=0.9).params, Limits(0.5, memory=0.9).params) == (0.8, 1.0, 0.5)
    assert list(Recipe.of(memory=0.9, kv_cache=0.5, latency=0.7).fractions.items()) == [
        ("params", 1.0),
        ("bytes", 0.9),
        ("ns:prefill:1x1024", 0.7),
        ("ns:decode:1@1024", 0.7),
        ("kv_numbers", 0.5),
    ]


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    assert Recipe.of(np.float32(0.5)).limits.params == 0.5
    whole = {"seed": np.int64(3), "align": np.int64(16), "shots": np.int8(2), "tensor_parallel": np.int32(1)}
    recipe = Recipe.of(bos=np.bool_(True), **whole)
    assert recipe == Recipe.of(seed=3, align=16, bos=True, shots=2, tensor_parallel=1)
    recipe.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == recipe
    assert Recipe.of(align=np.bool_(False), rotate=np.bool_(True), fuse=np.bool_(True)).space.align is False
    with pytest.raises(GacError, match=r"seed=True"):
        Recipe.of(seed=np.bool_(True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": 3}, "a int as a method"),
        ({"calibration": ""}, "text=''"),
        ({"calibration": ["c4:2x8", ""]}, "text=('c4:2x8', '')"),
        ({"seed": -1}, "seed=-1"),
        ({"bos": "yes"}, "bos='yes'"),
        ({"shots": 3}, "shots=3"),
        ({"forms": "low_rnk"}, "form 'low_rnk' is unknown"),
        ({"forms": "low_rank:2"}, "form 'low_rank:2' is unknown"),
        ({"schemes": ["int3"]}, "scheme 'int3' is unknown; expected one of bf16"),
        *(({"head": wrong}, f"head={wrong!r}") for wrong in ("w4a16", "", 8)),
        ({"align": 8.0}, "align=8.0"),
        ({"align": "profile,group=0"}, "align=0"),
        ({"workloads": ["chat"]}, "workload 'chat'; expected prefill:BxS or decode:B@C"),
        ({"fuse": "sometimes"}, "fuse='sometimes'"),
        ({"tensor_parallel": 0}, "tensor_parallel=0"),
        ({"tensor_parallel": 2, "rule": "uniform"}, "rule='uniform'; expected loss, with tensor_parallel=2: other"),
        ({"refit": "residul"}, "refit='residul'; expected one of none, residual, update. Did you mean 'residual'?"),
        ({"latency": {"decode:8@64": 0.9}}, "latency='decode:8@64'; expected one of the plan's workloads (prefill:1x"),
        ({"metod": "svd"}, "the option 'metod'; expected one of budget, method"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GacError, match=re.escape(message)):
        Recipe.of(**options)


@pytest.mark.parametrize("fraction", [0, -0.5, float("nan"), float("inf"), True, "0.8", 1.0000001])
def test_a_limit_is_a_fraction(fraction: Any) -> None:
    for name in ("params", "memory", "kv_cache"):
        with pytest.raises(BudgetError, match=f"^limits.{name}={fraction!r}; expected .* above 0 and at most 1"):
            Limits(**{name: fraction})
    if fraction != 1.0000001:  # a workload may get slower
        with pytest.raises(BudgetError, match="expected a number above 0, the allowed fraction of the dense latency"):
            Recipe.of(latency=fraction)


def test_a_recipe_is_read_back_equal_and_may_leave_out_what_is_default(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    asked = Recipe.of(0.7, forms=["low_rank"], latency=0.9)
    asked.save(path)
    assert Recipe.load(path) == asked
    path.write_text('{"limits": {"memory": 0.6}, "deployment": {"fuse": true}}')
    assert Recipe.load(path) == Recipe.of(memory=0.6, fuse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(budget=0.8), "budget: Unexpected keyword argument"),
        (lambda d: d["measure"].update(seed="0"), "measure.seed: Input should be a valid integer"),
        (lambda d: d["limits"].update(params=2.0), "limits.params=2.0; expected a number above 0 and at most 1"),
        (lambda d: d.update(refit="again"), "refit"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    path = tmp_path / "recipe.json"
    Recipe.of().save(path)
    with edited(path) as document:
        change(document)
    with pytest.raises(GacError, match=message):
        Recipe.load(path)


def test_the_record_and_the_keywords_ask_for_the_same(small: Small) -> None:
    options: dict[str, Any] = {"tokenizer": small.tokenizer, "progress": False}
    plan = small.allocate(0.7, fuse=True)
    assert gac.allocate(small.model, recipe=plan.recipe, **options) == plan
    memory = small.allocate(memory=0.7, fuse=True, budget=None)
    assert [site.weights for site in memory.sites] == [site.weights for site in plan.sites]
    assert [(one.column, one.asked) for one in memory.limits] == [("params", 1.0), ("bytes", 0.7)]
    assert "memory " in memory.summary()
    with pytest.raises(GacError, match=r"^a recipe together with budget, fuse; "):
        gac.allocate(small.model, 0.7, recipe=plan.recipe, fuse=True, **options)


def test_the_slack_is_named_rightly_everywhere() -> None:
    assert f"None: {SLACK} " in (Recipe.__doc__ or "")
    assert f"Default: {SLACK}, and 0 with a limit" in " ".join(run("allocate", "--help-all").stdout.split())
    assert f"at most {100 * SLACK:g} % more" in (DOCS / "limits.md").read_text()
    assert f"slack=None,  # {SLACK} (0 with a limit of latency)" in (DOCS / "allocate.md").read_text()
