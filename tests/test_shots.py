"""Plans of two shots: what a user calls, what is kept of them, and what a user gets wrong."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gac
from gac.core.errors import GacError
from gac.measurement import calibration
from gac.plan.summary import allocate_command
from tests.changed import with_recipe
from tests.cli.commands import run
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small


def compressed(small: Small, plan: gac.Plan) -> Any:
    return small.compress(plan, model=copy.deepcopy(small.model))


def same(one: Any, other: Any) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


# --- the plan -------------------------------------------------------------------------------------------------------


def test_a_second_shot_plans_with_other_gradients(small: Small) -> None:
    one, two = (small.allocate(0.6, shots=shots) for shots in (1, 2))
    assert (one.recipe.measure.shots, two.recipe.measure.shots) == (1, 2)
    assert one.prediction.loss != two.prediction.loss
    assert one.prediction.dense_perplexity == two.prediction.dense_perplexity
    assert not one.compare(two).same_prediction
    assert two.summary().count(", seed 0, two shots\n") == 1
    assert "two shots" not in one.summary()
    assert "--shots" not in allocate_command(one)


def test_the_same_call_gives_the_same_plan(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "home"))
    before = small.allocate(0.6)
    files = {path: path.read_bytes() for path in (tmp_path / "home").rglob("*.safetensors")}
    first = small.allocate(0.6, shots=2)
    assert {path: path.read_bytes() for path in files} == files
    assert (small.allocate(0.6), small.allocate(0.6, shots=2)) == (before, first)
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "empty"))
    assert small.allocate(0.6, shots=2) == first


def test_they_serve_every_budget_and_form(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    small.allocate(0.8, shots=2)
    monkeypatch.setattr("gac.api.first_shot", lambda *_, **__: pytest.fail("measured again"))
    small.allocate(0.6, shots=2, align=False, forms=("low_rank", "head_dim"), fuse=True)
    small.frontier(shots=2, points=3)


def test_an_interrupted_second_shot_goes_on(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small.allocate(0.6, shots=2)
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "other"))
    stream = calibration.stream_moments

    def cut_short(run: Any, sites: Any) -> Iterator[Any]:
        for layer, moments in stream(run, sites):
            yield layer, moments
            if run.model is not small.model:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(calibration, "stream_moments", cut_short)
        with pytest.raises(KeyboardInterrupt):
            small.allocate(0.6, shots=2)
    assert len([*(tmp_path / "other").rglob("losses-*")]) == 3  # two layers of one shot, the last of two
    assert small.allocate(0.6, shots=2) == whole


# --- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refit", ["residual", "none"])
def test_it_is_compressed_saved_and_loaded(small: Small, tmp_path: Path, refit: str) -> None:
    plan = small.allocate(0.6, shots=2, refit=refit)
    small.there_and_back(plan, tmp_path)
    assert " --seed 0 --shots 2 -o plan.json" in (tmp_path / "small" / "README.md").read_text(encoding="utf-8")


def test_compressing_takes_the_second_shots_factors_or_measures_them_again(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small.allocate(0.6, shots=2)
    model = compressed(small, plan)
    assert not same(model, compressed(small, with_recipe(plan, shots=1)))
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "empty"))
    assert same(model, compressed(small, plan))


def test_another_layout_has_a_second_shot(small: Small) -> None:
    dense: Any = small_model(small_config("phi3"))
    plan = small.allocate(0.6, shots=2, fuse=True, model=dense)
    assert plan.prediction.loss != small.allocate(0.6, fuse=True, model=dense).prediction.loss
    with torch.no_grad():
        assert torch.isfinite(small.compress(plan, model=dense)(torch.arange(12)[None]).logits).all()


def test_a_plan_that_no_second_shot_can_have_made_is_not_applied(small: Small) -> None:
    plan = small.allocate(0.6, method="svd-llm")
    with pytest.raises(GacError, match="shots=2 with method svd-llm"):
        compressed(small, with_recipe(plan, shots=2))


# --- what is refused, and what is said ------------------------------------------------------------------------------


def test_it_is_refused_before_anything_is_measured(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("gac.measurement.session.measure_curves")
    for wrong in ({"shots": 3}, {"shots": 2, "method": "asvd"}, {"shots": 2, "rule": "uniform"}):
        with pytest.raises(GacError, match="shots="):
            small.allocate(0.6, **wrong)
    with pytest.raises(GacError, match="shots=2 with method svd"):
        small.frontier(method="svd", shots=2)


def test_the_command_line_says_what_two_shots_cost(small: Small, tmp_path: Path) -> None:
    small.model.save_pretrained(tmp_path / "model")
    small.tokenizer.save_pretrained(tmp_path / "model")
    plan, text = tmp_path / "plan.json", small.options["calibration"]
    result = run("allocate", tmp_path / "model", "--calibration", text, "-o", plan, "--shots", 2)
    assert result.exit_code == 0, result.output
    assert "two shots: calibration takes twice as long and twice the disk" in result.stderr
    assert gac.Plan.load(plan).recipe.measure.shots == 2
    applied = run("compress", tmp_path / "model", "--plan", plan, "-o", tmp_path / "small")
    assert "or taken again where they are gone (in two shots)" in applied.stderr
