"""A recipe: what it refuses, what is written of it, and that the record and the keywords ask for the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gac
from gac.core.errors import BudgetError, GacError
from gac.plan.recipe import Deployment, Limits, Measure, Recipe, Space


def test_keywords_are_fields() -> None:
    found = Recipe.of(
        0.7, method="svd", calibration="c4:8x64", align="profile,group=128", latency=0.9, fuse="auto", profile=Path("a")
    )
    assert found == Recipe(
        Measure("svd", "c4:8x64"),
        Space(align=128),
        Deployment(profile="a", fuse="auto"),
        Limits(0.7, latency={"prefill:1x1024": 0.9, "decode:1@1024": 0.9}),
    )


def test_one_text_is_a_string_and_several_are_a_list(tmp_path: Path) -> None:
    one, several = Recipe.of(calibration=["c4:2x8"]), Recipe.of(calibration=["c4:2x8", "a.txt:1x8"])
    assert (one.measure.text, several.measure.text) == ("c4:2x8", ("c4:2x8", "a.txt:1x8"))
    several.save(tmp_path / "recipe.json")
    assert json.loads((tmp_path / "recipe.json").read_text())["measure"]["text"] == ["c4:2x8", "a.txt:1x8"]
    assert Recipe.load(tmp_path / "recipe.json") == several


def test_memory_takes_the_place_of_the_budget() -> None:
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
    with pytest.raises(GacError, match=r"Measure\(seed=True\); expected a whole number"):
        Recipe.of(seed=np.bool_(True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": 3}, "a int as a method"),
        ({"calibration": ""}, "measure.text=''; expected a name or a path, or several"),
        ({"calibration": ["c4:2x8", ""]}, "measure.text=('c4:2x8', ''); expected a name or a path, or several"),
        ({"seed": -1}, "Measure(seed=-1); expected a whole number, 0 to"),
        ({"bos": "yes"}, "Measure(bos='yes'); expected True or False or None"),
        ({"shots": 3}, "Measure(shots=3); expected 1 or 2"),
        ({"forms": "low_rnk"}, "form 'low_rnk' is unknown"),
        ({"schemes": ["int3"]}, "scheme 'int3' is unknown; expected one of bf16"),
        ({"align": 8.0}, "space.align=8.0; expected True, False, the number that dims are to be multiples of"),
        ({"align": "profile,group=0"}, "space.align=0; expected True"),
        ({"workloads": ["chat"]}, "workload 'chat'; expected prefill:BxS or decode:B@C"),
        ({"fuse": "sometimes"}, "Deployment(fuse='sometimes'); expected True or False"),
        ({"tensor_parallel": 0}, "Deployment(tensor_parallel=0); expected a whole number, 1 to"),
        (
            {"tensor_parallel": 2, "rule": "uniform"},
            "rule='uniform'; expected loss, with tensor_parallel=2: other rules",
        ),
        ({"refit": "residul"}, "refit='residul'; expected one of none, residual, update. Did you mean 'residual'?"),
        ({"metod": "svd"}, "the option 'metod'; expected one of budget, method"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GacError) as caught:
        Recipe.of(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["params", "memory", "kv_cache"])
@pytest.mark.parametrize("fraction", [0, -0.5, 1.0000001, float("nan"), float("inf"), True, "0.8"])
def test_a_kept_fraction_is_above_0_and_at_most_1(name: str, fraction: Any) -> None:
    with pytest.raises(BudgetError) as caught:
        Limits(**{name: fraction})
    assert caught.value.given == f"limits.{name}={fraction!r}"
    assert "above 0 and at most 1" in caught.value.expected


@pytest.mark.parametrize("fraction", [0, -1.0, float("nan"), float("inf"), "0.9", True])
def test_a_latency_limit_is_a_positive_number(fraction: Any) -> None:
    with pytest.raises(BudgetError, match="expected a number above 0, the allowed fraction of the dense latency"):
        Recipe.of(latency=fraction)


def test_a_latency_limit_for_another_workload() -> None:
    with pytest.raises(BudgetError) as caught:
        Recipe.of(workloads=["prefill:1x1024"], latency={"decode:8@64": 0.9})
    assert str(caught.value) == (
        "limits.latency='decode:8@64'; expected one of the plan's workloads (prefill:1x1024). "
        "Add it to the workloads, or drop the limit."
    )


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
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(GacError) as caught:
        Recipe.load(path)
    assert message in str(caught.value)


def test_the_record_and_the_keywords_ask_for_the_same(tiny_model: Any, tiny_tokenizer: Any, text_file: Path) -> None:
    options: dict[str, Any] = {"calibration": f"{text_file}:4x64", "profile": "nvidia-h100-80gb-hbm3", "fuse": True}
    given: dict[str, Any] = {"tokenizer": tiny_tokenizer, "progress": False}
    plan = gac.allocate(tiny_model, 0.7, **options, **given)
    assert gac.allocate(tiny_model, recipe=plan.recipe, **given) == plan
    memory = gac.allocate(tiny_model, memory=0.7, **options, **given)
    assert [site.weights for site in memory.sites] == [site.weights for site in plan.sites]
    assert [(one.column, one.asked) for one in memory.limits] == [("params", 1.0), ("bytes", 0.7)]
    assert "memory " in memory.summary()
    with pytest.raises(GacError) as caught:
        gac.allocate(tiny_model, 0.7, recipe=plan.recipe, fuse=True, **given)
    assert caught.value.given == "a recipe together with budget, fuse"
