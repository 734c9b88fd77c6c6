"""Losses by text: predicted from runs of the plan's modules, and balanced by the weights of the texts."""

from copy import deepcopy
from dataclasses import replace
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gac
from gac.compression.by_text import least_worst
from gac.core.distributed.ranks import ALONE
from gac.core.errors import GacError, ModelError
from gac.measurement.runs import ModelRuns, diverged, predicted
from gac.measurement.store import StatisticsStore
from gac.measurement.text import TextSpec, calibration_windows
from gac.plan.evidence import CalibrationPart
from gac.plan.plan import TextPrediction
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small

LENGTH = 32


@pytest.fixture
def texts(small: Small, tmp_path: Path) -> list[str]:
    """Two texts of which the first has four times the windows of the second."""
    digits = tmp_path / "digits.txt"
    digits.write_text("".join(Random(0).choices("0123456789", k=4000)), encoding="utf-8")
    return [f"{small.text}:8x{LENGTH}", f"{digits}:2x{LENGTH}"]


def divergence(small: Small, compressed: Any, text: str) -> float:
    windows = calibration_windows(TextSpec.parse(text), small.tokenizer, 0, None).ids
    with torch.no_grad():
        return fmean(float(diverged(predicted(small.model, ids), predicted(compressed, ids))) for ids in windows)


def test_the_predicted_loss_is_spread_over_the_texts_as_the_divergence_is(small: Small, texts: list[str]) -> None:
    plan = small.allocate(0.6, calibration=texts, refit="none")
    first, second = plan.prediction.by_text
    assert [first.text, second.text] == [part.text for part in plan.measured.calibration.parts]
    assert (8 * first.loss + 2 * second.loss) / 10 == pytest.approx(plan.prediction.loss)
    compressed = gac.compress(deepcopy(small.model), plan, tokenizer=small.tokenizer, progress=False)
    ratio = divergence(small, compressed, texts[0]) / divergence(small, compressed, texts[1])
    assert first.loss / second.loss == pytest.approx(ratio, rel=1e-3)
    for prediction, text in zip((first, second), texts, strict=True):
        name, _, size = text.rpartition(":")
        measured = gac.perplexity(small.model, small.tokenizer, name, windows=None, length=LENGTH, progress=False)
        assert abs(log(prediction.dense_perplexity / measured.value)) < 0.1, size
        assert prediction.perplexity == pytest.approx(prediction.dense_perplexity * exp(prediction.loss))
        assert f"on {prediction.text}: +{prediction.loss:.4f}" in plan.summary()
    assert small.allocate(0.6).prediction.by_text == ()


def test_where_experts_go_each_text_loses_what_it_is_seen_to_lose(
    small: Small, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(small_config("mixtral", num_hidden_layers=2))
    ran: list[set[str]] = []

    def lost(runs: Any, modules: dict[str, Any]) -> float:
        ran.append(set(modules))
        return 0.01 * len(runs._windows)

    monkeypatch.setattr(ModelRuns, "lost", lost)
    plan = small.allocate(0.6, model=model, forms=["experts"], calibration=texts, latency="any", refit="none")
    changed = {choice.name for choice in plan.weights if choice.changed}
    assert changed
    assert ran == [changed, changed]
    assert [by.loss for by in plan.prediction.by_text] == pytest.approx([0.08, 0.02])
    assert plan.prediction.loss == pytest.approx((8 * 0.08 + 2 * 0.02) / 10)
    summed = sum(site.loss for site in plan.sites)
    assert plan.prediction.summed == pytest.approx(summed)
    assert plan.prediction.perplexity == pytest.approx(plan.prediction.dense_perplexity * exp(plan.prediction.loss))


def test_texts_of_one_weight_each_count_alike(small: Small, texts: list[str], tmp_path: Path) -> None:
    plan = small.allocate(0.6, calibration=texts, balance="mean")
    assert [part.weight for part in plan.measured.calibration.parts] == [0.625, 2.5]
    assert fmean(by.loss for by in plan.prediction.by_text) == pytest.approx(plan.prediction.loss)
    assert plan.measured.calibration.loss == pytest.approx(
        fmean(log(by.dense_perplexity) for by in plan.prediction.by_text)
    )
    assert "counted 2.5 times" in plan.summary()
    small.there_and_back(plan, tmp_path)


def test_the_worst_text_loses_no_more_than_with_equal_weights(
    small: Small, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "home"))
    mean = small.allocate(0.6, calibration=texts, balance="mean")
    stores = set((tmp_path / "home" / "statistics").iterdir())
    letters = tmp_path / "letters.txt"
    letters.write_text("".join(Random(1).choices("abcdefgh ", k=4000)), encoding="utf-8")
    worst = small.allocate(0.6, calibration=texts, balance="worst", check_text=str(letters))
    assert max(by.loss for by in worst.prediction.by_text[:2]) <= max(by.loss for by in mean.prediction.by_text)
    assert len({*(tmp_path / "home" / "statistics").iterdir()}) == len(stores)  # two texts and a mixture
    assert gac.compress(deepcopy(small.model), worst, tokenizer=small.tokenizer, progress=False).gac_plan == worst


def test_the_search_finds_weights_of_equal_losses(tmp_path: Path) -> None:
    """Losses that fall with a text's share."""

    def choose(weights: Any) -> Any:
        weights = weights or (1.0, 1.0)
        shares = [weight / sum(weights) for weight in weights]
        losses = 0.3 * (1 - shares[0]) + 0.2, 0.1 * (1 - shares[1]) + 0.1
        parts = tuple(CalibrationPart(name, 4, 1.0, weight) for name, weight in zip("ab", weights, strict=True))
        by_text = tuple(TextPrediction(name, loss, 1.0, 1.0) for name, loss in zip("ab", losses, strict=True))
        calibration, prediction = SimpleNamespace(parts=parts), SimpleNamespace(by_text=by_text)
        plan = SimpleNamespace(measured=SimpleNamespace(calibration=calibration), prediction=prediction)
        return plan, SimpleNamespace(ranks=ALONE, store=StatisticsStore(tmp_path / str(weights)))

    assert choose(())[0].prediction.by_text[0].loss == 0.35
    assert least_worst(choose).prediction.by_text[0].loss < 0.23


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"balance": "worst"}, "measure.balance='worst'; expected several calibration texts"),
        ({"balance": "median"}, "balance='median'"),
    ],
)
def test_weights_of_one_text_are_refused(small: Small, options: dict[str, str], problem: str) -> None:
    with pytest.raises(GacError, match=problem):
        small.allocate(0.8, **options)


def test_a_frontier_has_one_weight_a_text(small: Small, texts: list[str]) -> None:
    with pytest.raises(GacError, match="every point has other weights of the texts"):
        small.frontier(calibration=texts, balance="worst", points=3)
    frontier = small.frontier(calibration=texts, balance="mean", points=3)
    assert [part.weight for part in frontier.measured.calibration.parts] == [0.625, 2.5]


def test_a_model_that_is_offloaded_has_no_losses_by_text(
    small: Small, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gac.models.plain._offloaded", lambda model: "model.embed_tokens.weight")
    assert small.allocate(0.6, calibration=texts).prediction.by_text == ()
    with pytest.raises(ModelError, match="balance='worst'"):
        small.allocate(0.6, calibration=texts, balance="worst")


def test_a_plan_whose_texts_are_others_is_refused(small: Small, texts: list[str]) -> None:
    plan = small.allocate(0.6, calibration=texts)
    with pytest.raises(GacError, match=r"prediction\.by_text"):
        replace(plan, prediction=replace(plan.prediction, by_text=plan.prediction.by_text[:1]))


@pytest.mark.parametrize("schemes", [("w4a16:32",), ("bf16", "w8a8")])
def test_quantised_plans_have_losses_by_text(small: Small, texts: list[str], schemes: tuple[str, ...]) -> None:
    plan = small.allocate(None, memory=0.6, calibration=texts, schemes=schemes, rotate=False)
    assert min(by.loss for by in plan.prediction.by_text) > 0


def test_the_loss_on_a_text_that_is_not_calibrated_on_is_predicted(
    small: Small, texts: list[str], tmp_path: Path
) -> None:
    name = texts[1].rpartition(":")[0]
    letters = tmp_path / "letters.txt"
    letters.write_text("".join(Random(1).choices("abcdefgh ", k=4000)), encoding="utf-8")
    for calibration in (texts[0], [texts[0], f"{letters}:4x{LENGTH}"]):
        plan = small.allocate(0.6, calibration=calibration, check_text=name, refit="none")
        *calibrated, checked = plan.prediction.by_text
        assert [by.text for by in calibrated] == [part.text for part in plan.measured.calibration.parts]
        assert checked.text == name
        assert f"on {name}, which is not calibrated on: +{checked.loss:.4f}" in plan.summary()
        plan.save(tmp_path / "plan.json")
        assert gac.Plan.load(tmp_path / "plan.json") == plan
