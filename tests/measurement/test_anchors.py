"""Prices of latents that pass through what the model was measured to lose."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.forms import form_named
from gac.forms.curvature.registry import METHODS
from gac.forms.latent import Latent
from gac.forms.latent.anchors import LARGEST_RATIO, anchor_ranks, anchored
from gac.measurement.attended import held_out, seen_windows
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import LayerFit, stream_fits
from gac.measurement.runs import ModelRuns
from gac.measurement.store import StatisticsStore
from gac.models.families import family_of
from gac.models.streaming import streamed
from tests.models.small import weights_of

PRICE = np.array([8.0, 4.0, 2.0, 1.0, 0.5, 0.0])
WINDOWS = torch.randint(0, 256, (13, 16), generator=torch.Generator().manual_seed(4))
FORM = form_named("latent")


def test_a_curve_passes_through_what_was_measured() -> None:
    found = anchored(PRICE, {4: 0.25, 1: 8.0})
    assert found[[4, 1]] == pytest.approx([0.25, 8.0])
    ratios = found[:-1] / PRICE[:-1]
    assert ratios[[0, 1]] == pytest.approx([2.0, 2.0])  # beyond the anchors it stays in their ratio to the price
    assert np.diff(np.log(ratios[1:])) == pytest.approx([-np.log(4) / 3] * 3)
    assert found[-1] == 0


def test_a_curve_without_anchors_is_the_price() -> None:
    assert anchored(PRICE, {}) is PRICE
    assert anchored(PRICE, {3: 1.0, 1: 4.0}) == pytest.approx(PRICE)


@pytest.mark.parametrize("noise", [{4: 3.0, 3: 0.5, 1: 4.0}, {4: -1.0, 2: 0.0}, {3: 1e9}])
def test_noise_never_lets_a_curve_rise_or_leave_the_price_far(noise: dict[int, float]) -> None:
    found = anchored(PRICE, noise)
    assert (np.diff(found) <= 0).all()
    assert (found <= LARGEST_RATIO * PRICE * (1 + 1e-9)).all()
    assert (found >= PRICE / LARGEST_RATIO * (1 - 1e-9)).all()


def test_anchors_lie_at_the_ranks_that_cost_as_much() -> None:
    assert anchor_ranks(PRICE, (0.5, 1.5, 3.0)) == [4, 2, 1]
    assert anchor_ranks(PRICE, (1.5, 1.6, 100.0)) == [2]
    assert anchor_ranks(PRICE, (100.0,)) == []


def test_windows_are_held_out_of_both_halves() -> None:
    assert held_out(5, 512) == []
    assert held_out(11, 512) == [5]
    assert held_out(12, 512) == [3, 9]
    assert held_out(64, 1024) == [16, 48]
    assert len(held_out(64, 128)) == 8
    assert seen_windows(12, 6, [3, 9]) == [5, 5]
    assert seen_windows(1, 1, []) == [1]


def run_of(model: Any, windows: Tensor = WINDOWS, store: StatisticsStore | None = None) -> CalibrationRun:
    return CalibrationRun(model, windows, METHODS.get("kfac"), store, progress=False)


def fits_of(run: CalibrationRun, *forms: str) -> dict[int, LayerFit]:
    config: Any = run.model.config
    return dict(stream_fits(run, family_of(config).sites(config), forms=forms))


def losses_of(fits: Mapping[int, LayerFit], form: str = "latent") -> dict[str, Floats]:
    """By the weight's name."""
    found = {name: loss for fit in fits.values() for name, loss in fit.losses.items()}
    return {name.removeprefix(f"{form}/"): loss for name, loss in found.items() if name.startswith(f"{form}/")}


@pytest.fixture
def sharp(tiny_model: Any) -> Any:
    """A model whose attention and predictions are no longer nearly even, so that changes are felt."""
    with torch.no_grad():
        tiny_model.lm_head.weight.mul_(20)
        for layer in tiny_model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.o_proj.weight.mul_(20)
    return tiny_model


@pytest.fixture
def prices(sharp: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Floats]:
    """Curves without anchors. From then on the form has one, which costs a weight ``level(prices)``."""
    monkeypatch.setattr(Latent, "loss", replace(Latent.loss, anchors=()))
    found = losses_of(fits_of(run_of(sharp), "latent"))
    monkeypatch.setattr(Latent, "loss", replace(Latent.loss, anchors=(level(found) * len(found),)))
    return found


def level(prices: Mapping[str, Floats]) -> float:
    return min(float(price[len(price) // 2]) for price in prices.values())


def test_what_is_held_out_is_in_no_moment_of_keys_and_values(sharp: Any) -> None:
    out = held_out(*WINDOWS.shape)
    other = WINDOWS.clone()
    other[out] = WINDOWS[[0, 1]]
    sites = family_of(sharp.config).sites(sharp.config)
    weight = next(weight for weight in weights_of(sharp.config) if FORM.applies_to(weight))
    runs = (replace(run_of(sharp, ids), attended=True) for ids in (WINDOWS, other))
    found = [moments for run in runs for layer, moments in run.moments(sites) if layer == 0 and moments is not None]
    for name in ("inputs", "gradients"):
        assert torch.equal(*(getattr(one.attended(weight), name) for one in found))
        assert not torch.equal(*(getattr(one.of(weight), name) for one in found))


def test_a_curve_is_what_the_model_loses_on_text_that_is_held_out(sharp: Any, prices: dict[str, Floats]) -> None:
    fits = fits_of(run_of(sharp), "latent")
    runs = ModelRuns(sharp, list(sharp.model.layers), WINDOWS[held_out(*WINDOWS.shape)], [])
    found = losses_of(fits)
    for weight in filter(FORM.applies_to, weights_of(sharp.config)):
        (rank,) = anchor_ranks(prices[weight.name], [level(prices)])
        kept = ChainMap(*(dict(fit.kept.tensors) for fit in fits.values()))
        second, first = (kept[f"latent.{name}/{weight.name}"] for name in ("second", "first"))
        rows = first.view(len(second), -1, weight.in_features)[:, :rank]
        module = nn.Linear(weight.in_features, weight.out_features, bias=False)
        module.weight.data = (second[:, :, :rank] @ rows).flatten(0, 1)
        lost = runs.divergence({weight.name: module})
        assert found[weight.name][rank] == pytest.approx(lost, rel=1e-2)
        assert found[weight.name] == pytest.approx(prices[weight.name] * lost / prices[weight.name][rank], rel=1e-2)


def test_latents_of_few_bits_rest_on_the_corrected_price(sharp: Any, prices: dict[str, Floats]) -> None:
    fits = fits_of(run_of(sharp), "latent:int8")
    exact, rounded = losses_of(fits), losses_of(fits, "latent:int8")
    for name, price in exact.items():
        assert price[:-1] != pytest.approx(prices[name][:-1], rel=1e-3)
        added = rounded[name] - price
        assert added[0] == 0
        assert (added[1:] > 0).all()


def test_kept_curves_are_read_and_the_model_is_not_run(
    sharp: Any, prices: dict[str, Floats], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(sharp, store=StatisticsStore(tmp_path))
    first = losses_of(fits_of(run, "latent"))
    monkeypatch.delattr(ModelRuns, "divergence")
    again = losses_of(fits_of(run, "latent"))
    assert all(np.array_equal(loss, again[name]) for name, loss in first.items())


def test_rounding_in_16_bits_is_no_loss(sharp: Any, prices: dict[str, Floats], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the full rank loses there is subtracted."""
    monkeypatch.setattr(ModelRuns, "divergence", lambda _, modules: 1.0)
    found = losses_of(fits_of(run_of(sharp.bfloat16()), "latent"))
    for name, price in prices.items():
        assert found[name][1] < price[1] / 4
    found = losses_of(fits_of(run_of(sharp.float()), "latent"))
    for name, price in prices.items():
        assert found[name][1] > 4 * price[1]


def test_a_model_that_is_streamed_has_the_same_curves(sharp: Any, prices: dict[str, Floats]) -> None:
    pytest.importorskip("accelerate")
    first = losses_of(fits_of(run_of(sharp), "latent"))
    again = losses_of(fits_of(run_of(streamed(sharp, "cpu")), "latent"))
    assert all(np.array_equal(loss, again[name]) for name, loss in first.items())


def test_methods_without_gradients_run_nothing(sharp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Latent, "loss", replace(Latent.loss, anchors=(1e-9,)))
    monkeypatch.delattr(ModelRuns, "divergence")
    assert losses_of(fits_of(replace(run_of(sharp), method=METHODS.get("svd-llm")), "latent"))
