"""Limits that are sizes of the whole model: what they count, what they allow, and what no choice can meet."""

import logging
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import gac
from gac.allocation.whole_model import in_fractions
from gac.core.errors import BudgetError, GacError, PlanError
from gac.measurement.untargeted import untargeted
from gac.models.families import family_of
from gac.plan.costs import floored, fraction_of
from gac.plan.plan import Plan
from gac.plan.recipe import Limits, Recipe, Space
from gac.plan.sizes import size_of
from gac.plan.summary import allocate_command
from tests.changed import edited
from tests.cli.commands import run
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small


@pytest.mark.parametrize(
    ("column", "text", "amount"),
    [
        ("bytes", "6GB", 6 * 10**9),
        ("bytes", " 600 mb ", 6 * 10**8),
        ("bytes", "5.5GiB", 11 * 2**29),
        ("params", "6B", 6 * 10**9),
        ("params", "0.0000015M", 1),
        ("params", "6000M", 6 * 10**9),
    ],
)
def test_a_size_is_read_exactly(column: str, text: str, amount: int) -> None:
    assert size_of(column, text) == amount


@pytest.mark.parametrize("text", ["6", "GB", "-6GB", "6 G B", "0GB", "1e3GB", "nanGB", "6K", "6" * 20 + "GB", ""])
def test_what_is_no_size(text: str) -> None:
    for limit in ("params", "memory"):
        with pytest.raises(BudgetError, match=rf"^limits.{limit}={text!r}; expected .*or a size of the whole model"):
            Limits(**{limit: text})


def test_units_of_the_other_limit_are_refused() -> None:
    for options in ({"budget": "6GB"}, {"memory": "6B"}, {"kv_cache": "6GB"}):
        with pytest.raises(BudgetError):
            Recipe.of(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("total", [1, 7, 106_168_320, 2**45 + 1])
def test_a_fraction_of_an_amount_allows_exactly_that(total: int) -> None:
    for allowed in {1, total // 3 or 1, total - 1 or 1, total}:
        assert floored(fraction_of(allowed, total), total) == allowed


@pytest.mark.parametrize("options", [{}, {"rotate": True}, {"head": "w8a16"}, {"rotate": True, "head": "w8a16"}])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_not_targeted_is_counted_as_plans_count_it(
    small: Small, tmp_path: Path, options: Any, tied: bool
) -> None:
    model = small_model(small_config("llama", tie_word_embeddings=tied))
    others = untargeted(model, Space(**options))
    plan = small.allocate(0.8, model=model, **options)
    used, _ = plan.bytes
    assert others["bytes"] == plan.model_bytes[0] - used
    kept = round(plan.kept_of_model * plan.measured.params)
    assert others["params"] == kept - plan.budget.used
    model.save_pretrained(tmp_path)
    assert untargeted(tmp_path, Space(**options)) == others


def test_plans_keep_within_a_size_and_are_made_again_from_their_recipe(small: Small, tmp_path: Path) -> None:
    dense = sum(values.numel() for values in small.model.parameters())
    others = untargeted(small.model, Space())
    asked = f"{(others['bytes'] + 0.7 * (2 * dense - others['bytes'])) / 1e6:.6f}MB"
    plan = small.allocate(None, memory=asked)
    size = size_of("bytes", asked)
    allowed = plan.limit("bytes")
    assert allowed is not None
    assert allowed.limit + others["bytes"] == size
    assert plan.model_bytes[0] <= size
    assert (plan.recipe.limits.params, type(plan.recipe.limits.memory)) == (1.0, float)
    assert f"in GB {plan.model_bytes[0] / 1e9:.4g} of {2 * dense / 1e9:.4g}, {size / 1e9:.4g} allowed" in plan.summary()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with edited(tmp_path / "plan.json") as document:
        document["recipe"]["limits"]["memory"] = asked
    with pytest.raises(PlanError, match=r"as its recipe says"):
        Plan.load(tmp_path / "plan.json")
    assert small.allocate(None, memory=plan.recipe.limits.memory) == plan
    parameters = small.allocate(f"{size / 2e6:.7f}M")
    assert parameters.budget.limit == size // 2 - others["params"]
    assert parameters.kept_of_model * dense <= size / 2
    with pytest.raises(BudgetError, match=r"a fraction: its budget is of the KV cache"):
        small.allocate("1M", method="palu")


def test_the_command_of_a_plan_has_its_exact_fraction(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small.allocate("0.2M", memory="0.39MB")
    words = shlex.split(allocate_command(plan).replace("\\\n", " "))
    requests: list[Recipe] = []
    monkeypatch.setattr("gac.api.allocate", lambda *_, recipe, **__: requests.append(recipe))
    run(*words[1:])
    assert requests[0].limits == plan.recipe.limits


@pytest.mark.parametrize(
    ("limits", "message", "remedy"),
    [
        ({"memory": "40MB"}, "memory='40MB', of the whole model; expected more than 56,693,376 bytes", "than 57MB, or"),
        ({"budget": "28M"}, "budget='28M', of the whole model; expected more than 28,346,688 para", "more than 29M."),
        ({"memory": "57MB"}, "(57MB of the whole model); expected at least", "MB of the whole model) or more"),
        ({"budget": "30M"}, "(30M of the whole model); expected at least", "M of the whole model) or more"),
    ],
)
def test_a_size_that_no_choice_reaches_is_refused_before_anything_is_measured(
    limits: Any, message: str, remedy: str
) -> None:
    with pytest.raises(BudgetError, match=re.escape(message)) as refused:
        gac.allocate("smollm2", forms=["narrow"], latency="any", **limits)
    assert remedy in refused.value.remedy


def test_a_size_above_the_dense_models_limits_nothing(caplog: pytest.LogCaptureFixture) -> None:
    config = small_config("llama")
    sites = family_of(config).sites(config)
    with caplog.at_level(logging.INFO, "gac"):
        recipe = in_fractions(Recipe.of(memory="6GB"), sites, {"params": 1, "bytes": 2})
    assert recipe.limits.memory == 1.0
    assert "memory 6GB limits nothing" in caplog.text


def test_known_shapes_alone_have_no_size() -> None:
    with pytest.raises(GacError, match=r"llama-3-8b, with a size of the whole model as a limit"):
        gac.allocate("llama-3-8b", memory="6GB")
