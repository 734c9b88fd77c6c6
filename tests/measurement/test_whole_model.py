"""What all latents lose together, beside the sum of what each loses alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gac.forms import form_named
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.registry import METHODS
from gac.forms.latent import Latent
from gac.forms.loss_curves import LossCurve, LossCurves, WholeModelLoss
from gac.measurement.attended import held_out
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import measure_curves, stream_kept
from gac.measurement.expected import expected_curves
from gac.measurement.runs import ModelRuns
from gac.measurement.store import StatisticsStore
from gac.measurement.whole_model import calibrated_to_whole_model
from gac.models.families import family_of
from gac.models.streaming import streamed
from gac.plan.recipe import Recipe
from tests.models.small import weights_of

WINDOWS = torch.randint(0, 256, (13, 16), generator=torch.Generator().manual_seed(4))
FORM = form_named("latent")
WHOLE = WholeModelLoss("latent", (1.0, 4.0), (1.0, 16.0))
LOSS = np.array([8.0, 4.0, 2.0, 1.0, 0.0])


def curves_of(**wholes: WholeModelLoss) -> LossCurves:
    latents = {("latent", "bf16", name): LossCurve(LOSS) for name in "kv"}
    few = {("latent:int8", "bf16", name): LossCurve(LOSS + 0.5) for name in "kv"}
    other = {("low_rank", "bf16", "q"): LossCurve(LOSS)}
    return LossCurves(latents | few | other, wholes={name.replace("_", ":"): one for name, one in wholes.items()})


# --- the map --------------------------------------------------------------------------------------------------------


def test_a_whole_passes_through_what_was_measured() -> None:
    assert [WHOLE.ratio(one) for one in (0.1, 1.0, 2.0, 4.0, 100.0)] == pytest.approx([1, 1, 2, 4, 4])
    assert WHOLE.ratio(0.0) == 1.0


def test_what_is_lost_together_never_falls_as_the_sum_grows() -> None:
    whole = WholeModelLoss("latent", (0.01, 0.1, 0.4), (0.05, 0.05, 0.9))
    sums = np.geomspace(1e-4, 10, 200)
    assert (np.diff([one * whole.ratio(one) for one in sums]) >= -1e-12).all()


def test_a_choice_loses_what_its_latents_lose_together() -> None:
    curves = curves_of(latent=WHOLE)
    both = [("latent", "k", 3), ("latent", "v", 3), ("low_rank", "q", 1)]
    assert curves.beyond_sum(both) == pytest.approx(2 * 2 - 2)
    assert curves.beyond_sum([("latent", "k", 4), ("low_rank", "q", 1)]) == 0
    assert curves_of().beyond_sum(both) == 0


def test_rounding_is_in_no_whole() -> None:
    curves = curves_of(latent=WHOLE, latent_int8=WHOLE)
    assert curves.beyond_sum([("latent", "k", 3), ("latent:int8", "v", 3)]) == pytest.approx(2)
    assert curves.beyond_sum([("latent:int8", "v", 4)]) == 0


def test_several_forms_are_one_whole() -> None:
    other = WholeModelLoss("latent:1", (2.0,), (6.0,))
    curves = curves_of(latent=WHOLE)
    both = LossCurves(
        dict(curves.by_key) | {("latent:1", "bf16", "v"): LossCurve(LOSS)}, wholes={"latent": WHOLE, "latent:1": other}
    )
    assert both.beyond_sum([("latent", "k", 3), ("latent:1", "v", 3)]) == pytest.approx((2 - 1) + (3 - 1))


@pytest.mark.parametrize("forms", [("latent",), ("latent:int8",)])
@pytest.mark.parametrize("refit", ["none", "residual"])
def test_a_share_of_each_loss_is_that_share_of_the_whole(forms: tuple[str, ...], refit: str, tiny_model: Any) -> None:
    recipe = Recipe.of(1.0, forms=forms, kv_cache=0.5, refit=refit)
    curves = curves_of(latent=WHOLE, latent_int8=WHOLE)
    found = expected_curves(curves, recipe, METHODS.get("kfac"), family_of(tiny_model.config))
    share = float(found.by_key["latent", "bf16", "k"].loss[0]) / 8
    chosen = [(forms[0], name, 3) for name in "kv"]
    assert found.beyond_sum(chosen) == pytest.approx(share * curves.beyond_sum(chosen))


# --- what is measured -----------------------------------------------------------------------------------------------


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


def run_of(model: Any, windows: Tensor = WINDOWS, store: StatisticsStore | None = None) -> CalibrationRun:
    return CalibrationRun(model, windows, METHODS.get("kfac"), store, progress=False)


def measured(run: CalibrationRun, *forms: str) -> LossCurves:
    config: Any = run.model.config
    return measure_curves(run, family_of(config).sites(config), forms=forms).curves


def test_a_whole_is_what_the_model_loses_with_all_its_weights_changed(sharp: Any, tmp_path: Path) -> None:
    run = run_of(sharp, store=StatisticsStore(tmp_path))
    curves = measured(run, "latent")
    sites, taken = family_of(sharp.config).sites(sharp.config), [*filter(FORM.applies_to, weights_of(sharp.config))]
    kept = {name: one for _, of in stream_kept(run, sites, ["latent"]) for name, one in of.tensors.items()}
    runs = ModelRuns(sharp, list(sharp.model.layers), WINDOWS[held_out(*WINDOWS.shape)], [])
    whole = curves.wholes["latent"]
    assert len(whole.summed) == 2
    for level, summed, lost in zip(Latent.loss.anchors, whole.summed, whole.lost, strict=True):
        modules, total = {}, 0.0
        for weight in taken:
            curve = curves.of(FORM, weight)
            assert curve is not None
            rank = max(at for at in range(curve.full + 1) if curve.loss[at] >= level / len(taken))
            total += float(curve.loss[rank])
            second, first = (kept[f"latent.{name}/{weight.name}"] for name in ("second", "first"))
            rows = first.view(len(second), -1, weight.in_features)[:, :rank]
            modules[weight.name] = torch.nn.Linear(weight.in_features, weight.out_features, bias=False)
            modules[weight.name].weight.data = (second[:, :, :rank] @ rows).flatten(0, 1)
        assert summed == pytest.approx(total)
        assert lost == pytest.approx(runs.divergence(modules), rel=1e-3)


def test_a_kept_whole_is_read_and_the_model_is_not_run(
    sharp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(sharp, store=StatisticsStore(tmp_path))
    first = measured(run, "latent:int8").wholes
    assert set(first) == {"latent", "latent:int8"}
    monkeypatch.delattr(ModelRuns, "divergence")
    assert measured(run, "latent:int8").wholes == first
    assert set(measured(run, "latent").wholes) == {"latent"}
    monkeypatch.undo()
    assert measured(run_of(sharp), "low_rank").wholes == {}


def test_without_held_out_windows_or_gradients_nothing_is_run(sharp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ModelRuns, "divergence")
    assert measured(run_of(sharp, WINDOWS[:5]), "latent").wholes == {}
    run = CalibrationRun(sharp, WINDOWS, METHODS.get("svd-llm"), progress=False)
    assert measured(run, "latent").wholes == {}


def test_rounding_in_16_bits_is_no_loss_and_a_whole_never_falls(sharp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = family_of(sharp.config).sites(sharp.config)
    weights = {layer: [one for site in sites if site.layer == layer for one in site.weights] for layer in range(2)}
    run = run_of(sharp.bfloat16())
    kept = LayerArtifacts(
        {name: one for _, of in stream_kept(run, sites, ["latent"]) for name, one in of.tensors.items()}
    )
    taken = [*filter(FORM.applies_to, weights_of(sharp.config))]
    curve = LossCurve(np.linspace(0.2, 0, FORM.full(taken[0]) + 1) / len(taken))
    curves = LossCurves({("latent", "bf16", weight.name): curve for weight in taken})
    lost = iter([1.0, 1.15, 1.1])  # of the full ranks, which is rounding, and at both levels
    monkeypatch.setattr(ModelRuns, "divergence", lambda _, modules: next(lost))
    whole = calibrated_to_whole_model(run, weights, [FORM], curves, lambda _: kept).wholes["latent"]
    assert whole.summed == pytest.approx((0.025, 0.1))
    assert whole.lost == pytest.approx((0.15, 0.15))


def test_of_a_model_that_is_streamed_it_is_the_same(sharp: Any) -> None:
    pytest.importorskip("accelerate")
    first = measured(run_of(sharp), "latent")
    assert measured(run_of(streamed(sharp, "cpu")), "latent").wholes == first.wholes
