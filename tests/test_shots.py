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
from tests.compression.applying import logits
from tests.small_pipeline import Small


def compressed(small: Small, plan: gac.Plan) -> Any:
    return small.compress(plan, model=copy.deepcopy(small.model))


def test_a_second_shot_plans_with_other_gradients(small: Small) -> None:
    one, two = (small.allocate(0.6, shots=shots) for shots in (1, 2))
    assert (one.recipe.measure.shots, two.recipe.measure.shots) == (1, 2)
    assert one.prediction.loss != two.prediction.loss
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


@pytest.mark.parametrize("refit", ["residual", "none"])
def test_it_is_compressed_saved_and_loaded(small: Small, tmp_path: Path, refit: str) -> None:
    plan = small.allocate(0.6, shots=2, refit=refit)
    small.there_and_back(plan, tmp_path)
    assert " --seed 0 --shots 2 -o plan.json" in (tmp_path / "small" / "README.md").read_text(encoding="utf-8")


def test_compressing_takes_the_second_shots_factors(small: Small, tmp_path: Path, monkeypatch: Any) -> None:
    plan = small.allocate(0.6, shots=2)
    expected = logits(compressed(small, plan))
    assert not torch.equal(expected, logits(compressed(small, with_recipe(plan, shots=1))))
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "empty"))
    assert torch.equal(expected, logits(compressed(small, plan)))


def test_it_is_refused_before_anything_is_measured(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small.allocate(0.6, method="svd-llm")
    monkeypatch.delattr("gac.measurement.session.measure_curves")
    with pytest.raises(GacError, match="shots=2 with method svd"):
        small.frontier(method="svd", shots=2)
    with pytest.raises(GacError, match="shots=2 with method svd-llm"):
        small.compress(with_recipe(plan, shots=2))


def test_the_command_line_says_what_two_shots_cost(directory: Path, text_file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    result = run("allocate", directory, "--calibration", f"{text_file}:4x64", "-o", plan, "--shots", 2)
    assert "two shots: calibration takes twice as long and twice the disk" in result.stderr
    assert gac.Plan.load(plan).recipe.measure.shots == 2
    applied = run("compress", directory, "--plan", plan, "-o", tmp_path / "small")
    assert "or measured again if missing (in two shots)" in applied.stderr
