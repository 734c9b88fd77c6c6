"""Prices of latents that pass through what the model was measured to lose, one weight changed at a time and all."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.forms import form_named
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.registry import METHODS
from gac.forms.latent import Latent
from gac.forms.latent.torch import LARGEST_RATIO, anchor_ranks, anchored
from gac.forms.loss_curves import LossCurve, LossCurves, WholeModelLoss
from gac.measurement.attended import held_out, seen_windows
from gac.measurement.calibration import CalibrationRun, stream_moments
from gac.measurement.curves import LayerFit, fit_layers, measure_curves
from gac.measurement.expected import expected_curves
from gac.measurement.joint_losses import with_joint_losses
from gac.measurement.runs import ModelRuns
from gac.models.families import family_of
from gac.models.sites import Weight
from gac.models.streaming import streamed
from gac.plan.recipe import Recipe
from tests.measurement import runs
from tests.measurement.runs import sites_of
from tests.models.small import weights_of

PRICE = np.array([8.0, 4.0, 2.0, 1.0, 0.5, 0.0])
WINDOWS = torch.randint(0, 256, (13, 16), generator=torch.Generator().manual_seed(4))
FORM = form_named("latent")
WHOLE = WholeModelLoss("latent", (1.0, 4.0), (1.0, 16.0))
LOSS = np.array([8.0, 4.0, 2.0, 1.0, 0.0])


# --- the curve of a weight ------------------------------------------------------------------------------------------


def test_a_curve_passes_through_what_was_measured() -> None:
    curve = anchored(PRICE, {4: 0.25, 1: 8.0})
    assert curve[[4, 1]] == pytest.approx([0.25, 8.0])
    ratios = curve[:-1] / PRICE[:-1]
    assert ratios[[0, 1]] == pytest.approx([2.0, 2.0])  # beyond the anchors it stays in their ratio to the price
    assert np.diff(np.log(ratios[1:])) == pytest.approx([-np.log(4) / 3] * 3)
    assert curve[-1] == 0
    assert anchored(PRICE, {}) is PRICE
    assert anchored(PRICE, {3: 1.0, 1: 4.0}) == pytest.approx(PRICE)


@pytest.mark.parametrize("noise", [{4: 3.0, 3: 0.5, 1: 4.0}, {4: -1.0, 2: 0.0}, {3: 1e9}])
def test_noise_never_lets_a_curve_rise_or_leave_the_price_far(noise: dict[int, float]) -> None:
    curve = anchored(PRICE, noise)
    assert (np.diff(curve) <= 0).all()
    assert (curve <= LARGEST_RATIO * PRICE * (1 + 1e-9)).all()
    assert (curve >= PRICE / LARGEST_RATIO * (1 - 1e-9)).all()


def test_anchors_lie_at_the_ranks_that_cost_as_much() -> None:
    assert anchor_ranks(PRICE, (0.5, 1.5, 3.0)) == [4, 2, 1]
    assert anchor_ranks(PRICE, (1.5, 1.6, 100.0)) == [2]


def test_windows_are_held_out_of_both_halves() -> None:
    assert [held_out(*shape) for shape in ((5, 512), (11, 512), (12, 512))] == [[], [5], [3, 9]]
    assert held_out(64, 1024) == [16, 48]
    assert len(held_out(64, 128)) == 8
    assert seen_windows([1] * 12, 6, [3, 9]) == [5, 5]
    assert seen_windows([1], 1, []) == [1]


# --- the map of the whole model -------------------------------------------------------------------------------------


def curves_of(**wholes: WholeModelLoss) -> LossCurves:
    latents = {("latent", "bf16", name): LossCurve(LOSS) for name in "kv"}
    few = {("latent:int8", "bf16", name): LossCurve(LOSS + 0.5) for name in "kv"}
    other = {("low_rank", "bf16", "q"): LossCurve(LOSS)}
    return LossCurves(latents | few | other, wholes={name.replace("_", ":"): loss for name, loss in wholes.items()})


def test_a_choice_loses_what_its_latents_lose_together() -> None:
    assert [WHOLE.ratio(total) for total in (0.1, 1.0, 2.0, 4.0, 100.0)] == pytest.approx([1, 1, 2, 4, 4])
    uneven = WholeModelLoss("latent", (0.01, 0.1, 0.4), (0.05, 0.05, 0.9))
    sums = np.geomspace(1e-4, 10, 200)
    assert (np.diff([total * uneven.ratio(total) for total in sums]) >= -1e-12).all()
    curves = curves_of(latent=WHOLE, latent_int8=WHOLE)
    both = [("latent", "k", 3), ("latent", "v", 3), ("low_rank", "q", 1)]
    assert curves.beyond_sum(both) == pytest.approx(2 * 2 - 2)
    assert curves.beyond_sum([("latent", "k", 4), ("low_rank", "q", 1)]) == 0
    assert curves_of().beyond_sum(both) == 0
    # Quantisation was not measured there.
    assert curves.beyond_sum([("latent", "k", 3), ("latent:int8", "v", 3)]) == pytest.approx(2)
    assert curves.beyond_sum([("latent:int8", "v", 4)]) == 0


@pytest.mark.parametrize(("form", "refit"), [("latent", "none"), ("latent:int8", "residual")])
def test_a_share_of_each_loss_is_that_share_of_the_whole(form: str, refit: str, tiny_model: Any) -> None:
    recipe = Recipe.of(1.0, forms=(form,), kv_cache=0.5, refit=refit)
    curves = curves_of(latent=WHOLE, latent_int8=WHOLE)
    expected = expected_curves(curves, recipe, METHODS.get("kfac"), family_of(tiny_model.config))
    share = float(expected.by_key["latent", "bf16", "k"].loss[0]) / 8
    chosen = [(form, name, 3) for name in "kv"]
    assert expected.beyond_sum(chosen) == pytest.approx(share * curves.beyond_sum(chosen))


# --- what is measured -----------------------------------------------------------------------------------------------


def run_of(model: Any, windows: Tensor = WINDOWS, method: str = "kfac") -> CalibrationRun:
    return runs.run_of(model, method=method, windows=windows)


def fits_of(run: CalibrationRun, *forms: str) -> dict[int, LayerFit]:
    return fit_layers(run, sites_of(run.model), forms=forms)


def losses_of(fits: Mapping[int, LayerFit], form: str = "latent") -> dict[str, Floats]:
    """By the weight's name."""
    losses = {name: loss for fit in fits.values() for name, loss in fit.losses.items()}
    return {name.removeprefix(f"{form}/"): loss for name, loss in losses.items() if name.startswith(f"{form}/")}


def measured(run: CalibrationRun, *forms: str) -> LossCurves:
    return measure_curves(run, sites_of(run.model), forms=forms).curves


def product(tensors: Mapping[str, Tensor], weight: Weight, rank: int) -> nn.Module:
    """A linear layer with the product of the factors of a rank."""
    second, first = (tensors[f"latent.{name}/{weight.name}"] for name in ("second", "first"))
    rows = first.view(len(second), -1, weight.in_features)[:, :rank]
    module = nn.Linear(weight.in_features, weight.out_features, bias=False)
    module.weight.data = (second[:, :, :rank] @ rows).flatten(0, 1)
    return module


@pytest.fixture
def sharp(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose attention and predictions are no longer nearly even, so that changes are felt."""
    with torch.no_grad():
        tiny_model.lm_head.weight.mul_(20)
        for layer in tiny_model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.o_proj.weight.mul_(20)
    monkeypatch.setattr(Latent, "loss", replace(Latent.loss, anchors=(0.02, 0.1)))
    return tiny_model


@pytest.fixture
def prices(sharp: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Floats]:
    """Curves without anchors. From then on the form has one, which costs a weight ``level(prices)``."""
    monkeypatch.setattr(Latent, "loss", replace(Latent.loss, anchors=()))
    prices = losses_of(fits_of(run_of(sharp), "latent"))
    monkeypatch.setattr(Latent, "loss", replace(Latent.loss, anchors=(level(prices) * len(prices),)))
    return prices


def level(prices: Mapping[str, Floats]) -> float:
    return min(float(price[len(price) // 2]) for price in prices.values())


def test_what_is_held_out_is_in_no_moment_of_keys_and_values(sharp: Any) -> None:
    other = WINDOWS.clone()
    other[held_out(*WINDOWS.shape)] = WINDOWS[[0, 1]]
    sites = sites_of(sharp)
    weight = next(weight for weight in weights_of(sharp.config) if FORM.applies_to(weight))
    both = (replace(run_of(sharp, ids), attended=True) for ids in (WINDOWS, other))
    moments = [dict(stream_moments(run, sites))[0] for run in both]
    for name in ("inputs", "gradients"):
        assert torch.equal(*(getattr(each.attended(weight), name) for each in moments))
        assert not torch.equal(*(getattr(each.of(weight), name) for each in moments))


def test_a_curve_is_what_the_model_loses_on_text_that_is_held_out(sharp: Any, prices: dict[str, Floats]) -> None:
    fits = fits_of(run_of(sharp), "latent", "latent:int8")
    model_runs = ModelRuns(sharp, list(sharp.model.layers), WINDOWS[held_out(*WINDOWS.shape)], [])
    curves, rounded = losses_of(fits), losses_of(fits, "latent:int8")
    tensors = LayerFit.merged([*fits.values()]).artifacts.tensors
    for weight in filter(FORM.applies_to, weights_of(sharp.config)):
        (rank,) = anchor_ranks(prices[weight.name], [level(prices)])
        lost = model_runs.divergence({weight.name: product(tensors, weight, rank)})
        assert curves[weight.name][rank] == pytest.approx(lost, rel=1e-2)
        assert curves[weight.name] == pytest.approx(prices[weight.name] * lost / prices[weight.name][rank], rel=1e-2)
        added = rounded[weight.name] - curves[weight.name]  # latents of few bits rest on the corrected price
        assert added[0] == 0
        assert (added[1:] > 0).all()


def test_a_whole_is_what_the_model_loses_with_all_its_weights_changed(sharp: Any) -> None:
    run = run_of(sharp)
    curves = measured(run, "latent")
    weights = [*filter(FORM.applies_to, weights_of(sharp.config))]
    tensors = LayerFit.merged([*fits_of(run, "latent").values()]).artifacts.tensors
    model_runs = ModelRuns(sharp, list(sharp.model.layers), WINDOWS[held_out(*WINDOWS.shape)], [])
    whole = curves.wholes["latent"]
    assert len(whole.summed) == 2
    for level, summed, lost in zip(Latent.loss.anchors, whole.summed, whole.lost, strict=True):
        modules, total = {}, 0.0
        for weight in weights:
            curve = curves.of(FORM, weight)
            assert curve is not None
            rank = max(at for at in range(curve.full + 1) if curve.loss[at] >= level / len(weights))
            total += float(curve.loss[rank])
            modules[weight.name] = product(tensors, weight, rank)
        assert summed == pytest.approx(total)
        assert lost == pytest.approx(model_runs.divergence(modules), rel=1e-3)


def test_where_the_model_is_not_run(sharp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(sharp)
    first = measured(run, "latent:int8")
    assert set(first.wholes) == {"latent", "latent:int8"}
    monkeypatch.delattr(ModelRuns, "divergence")
    again = measured(run, "latent:int8")
    assert again.wholes == first.wholes
    assert all(np.array_equal(curve.loss, again.by_key[key].loss) for key, curve in first.by_key.items())
    assert set(measured(run, "latent").wholes) == {"latent"}
    assert measured(run, "low_rank").wholes == {}
    assert measured(run_of(sharp, WINDOWS[:5]), "latent").wholes == {}
    assert measured(run_of(sharp, method="svd-llm"), "latent").wholes == {}


def test_rounding_in_16_bits_is_no_loss(sharp: Any, prices: dict[str, Floats], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the full rank loses there is subtracted."""
    monkeypatch.setattr(ModelRuns, "divergence", lambda _, modules: 1.0)
    curves = losses_of(fits_of(run_of(sharp.bfloat16()), "latent"))
    assert all(curves[name][1] < price[1] / 4 for name, price in prices.items())
    curves = losses_of(fits_of(run_of(sharp.float()), "latent"))
    assert all(curves[name][1] > 4 * price[1] for name, price in prices.items())


def test_rounding_in_16_bits_is_in_no_whole_which_never_falls(sharp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {
        layer: [weight for weight in weights_of(sharp.config) if f".{layer}." in weight.name] for layer in (0, 1)
    }
    run = run_of(sharp.bfloat16())
    sites = sites_of(sharp)
    kept = LayerArtifacts(
        ChainMap(*(dict(fit.artifacts.tensors) for fit in fit_layers(run, sites, forms=["latent"]).values()))
    )
    latents = [*filter(FORM.applies_to, weights_of(sharp.config))]
    curve = LossCurve(np.linspace(0.2, 0, FORM.full(latents[0]) + 1) / len(latents))
    curves = LossCurves({("latent", "bf16", weight.name): curve for weight in latents})
    lost = iter([1.0, 1.15, 1.1])  # of the full ranks, which is rounding, and at both levels
    monkeypatch.setattr(ModelRuns, "divergence", lambda _, modules: next(lost))
    whole = with_joint_losses(run, weights, [FORM], curves, kept).wholes["latent"]
    assert whole.summed == pytest.approx((0.025, 0.1))
    assert whole.lost == pytest.approx((0.15, 0.15))


def test_a_model_that_is_streamed_has_the_same_curves(sharp: Any) -> None:
    pytest.importorskip("accelerate")
    first = measured(run_of(sharp), "latent")
    again = measured(run_of(streamed(sharp, "cpu")), "latent")
    assert again.wholes == first.wholes
    assert all(np.array_equal(curve.loss, again.by_key[key].loss) for key, curve in first.by_key.items())
