"""Pairs inside a narrower MLP against their definition: the loss of the weights that they stand for."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gac.core.errors import PlanError
from gac.forms import form_named
from gac.forms.curvature.metric import Metric
from gac.forms.curvature.registry import METHODS
from gac.forms.narrow_pair import widths
from gac.forms.tensors import SiteBuild, Statistics, tensors_of
from gac.measurement.calibration import CalibrationRun, stream_moments
from gac.measurement.curves import LayerFit, fit_layers
from gac.measurement.store import StatisticsStore
from gac.models.families import family_of
from gac.models.sites import Site, Weight
from gac.testing.methods import loss_of
from tests.models.small import NEURONS, small_config, small_model

IDS = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
WIDTHS = widths(NEURONS)


def mlp_of(model: PreTrainedModel) -> Site:
    return next(site for site in family_of(model.config).sites(model.config) if site.kind == "mlp")


def measured(model: PreTrainedModel, method: str) -> tuple[LayerFit, Mapping[str, Metric], SiteBuild]:
    """What is measured of the first layer, the metrics of its MLP, and what builds that."""
    run, site = CalibrationRun(model, IDS, METHODS.get(method), progress=False), mlp_of(model)
    fit = fit_layers(run, [site], forms=["narrow_pair"])[0]
    moments = dict(stream_moments(run, [site]))[0]
    metrics = {one.name: run.method.metric(moments.of(one, run.method.pooled)) for one in site.weights}
    statistics = Statistics(model, fit.artifacts.moments, run.method, fit.artifacts)
    return fit, metrics, SiteBuild(site.weights, statistics)


def built(work: SiteBuild, weight: Weight, form: str, dim: int) -> Tensor:
    """The dense weight that a form at a dim stands for, its missing neurons where they were."""
    tensors, stay = (
        tensors_of(form_named(form)),
        work.artifacts.of(form_named(f"narrow_pair:{WIDTHS[2]}"), "stay", weight),
    )
    parts = {name: value.detach().double() for name, value in tensors.parameters(work, weight, dim).items()}
    padded = tensors.merge(weight, dim, parts)["weight"]
    found, neurons = torch.zeros_like(padded), padded.shape[0 if weight.neurons == "out" else 1] // weight.blocks
    for block in range(weight.blocks):
        there, here = block * neurons + stay, block * neurons + torch.arange(len(stay))
        if weight.neurons == "out":
            found[there] = padded[here]
        else:
            found[:, there] = padded[:, here]
    return found


@pytest.mark.parametrize(("model_type", "method"), [("llama", "kfac"), ("phi3", "svd-llm"), ("gpt2", "asvd")])
def test_the_curves_are_the_losses_of_what_is_built(model_type: str, method: str) -> None:
    model = small_model(small_config(model_type)).double()
    fit, metrics, work = measured(model, method)
    width = WIDTHS[2]
    name = f"narrow_pair:{width}"
    for weight in work.weights:
        dense = work.statistics.matrix(weight).detach()
        loss, metric = fit.losses[f"{name}/{weight.name}"], metrics[weight.name]
        assert len(loss) == form_named(name).full(weight) + 1
        assert loss[-1] == 0
        beyond = 0.0
        if weight.neurons == "in":
            beyond = fit.losses[f"narrow/{weight.name}"][width]
            assert loss_of(dense, built(work, weight, "narrow", width), metric) == pytest.approx(beyond, rel=1e-5)
        for rank in (1, 9, 30):
            # Nothing is in the rows of neurons that go.
            rows = dense if weight.neurons == "in" else built(work, weight, "narrow", width)
            lost = loss_of(rows, built(work, weight, name, rank), metric)
            assert lost == pytest.approx(beyond + loss[rank], rel=1e-4, abs=1e-6 * loss[0])


def test_no_pair_of_a_rank_loses_less() -> None:
    model = small_model(small_config("llama")).double()
    fit, metrics, work = measured(model, "kfac")
    weight, rank, name = work.weights[0], 9, f"narrow_pair:{WIDTHS[2]}"
    stay = work.artifacts.of(form_named(name), "stay", weight)
    dense, metric = work.statistics.matrix(weight).detach()[stay], metrics[weight.name]
    among = Metric(metric.inputs, metric.gradients[stay][:, stay])
    factors = factors_of(work, weight, name, rank)
    best = fit.losses[f"{name}/{weight.name}"][rank]
    assert loss_of(dense, factors[0] @ factors[1], among) == pytest.approx(best, rel=1e-4)
    torch.manual_seed(0)
    for step in (1e-1, 1e-2, 1e-3):
        second, first = (factor + step * factor.std() * torch.randn_like(factor) for factor in factors)
        assert loss_of(dense, second @ first, among) > best * (1 - 1e-6)
    second, first = factors_of(work, weight, "low_rank", rank)  # the rows that stay of a pair of all
    assert best < loss_of(dense, (second @ first)[stay], among)


def factors_of(work: SiteBuild, weight: Weight, name: str, rank: int) -> tuple[Tensor, Tensor]:
    parameters = tensors_of(form_named(name)).parameters(work, weight, rank)
    assert parameters is not None
    return parameters["second.weight"], parameters["first.weight"]


def test_measured_later_it_is_the_same_and_neurons_are_ordered_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Elimination runs for ``narrow`` alone, also where that is measured before and stored."""
    model = small_model(small_config("llama"))
    run = CalibrationRun(model, IDS, METHODS.get("kfac"), StatisticsStore(tmp_path / "later"), progress=False)
    at_once = replace(run, store=StatisticsStore(tmp_path / "at once"))
    expected = fit_layers(at_once, [mlp_of(model)], forms=["narrow_pair"])[0]
    before = fit_layers(run, [mlp_of(model)])[0]
    assert not any(name.startswith("narrow_pair") for name in before.losses)
    monkeypatch.setattr("gac.forms.narrow.torch.eliminate", None)
    for _ in range(2):  # measured, and read
        later = fit_layers(run, [mlp_of(model)], forms=["narrow_pair"])[0]
        assert sum(name.startswith("narrow_pair:") for name in later.losses) == 3 * len(WIDTHS)
        assert later.losses.keys() == expected.losses.keys()
        assert all((later.losses[name] == expected.losses[name]).all() for name in expected.losses)
        tensors = expected.artifacts.tensors
        assert all(torch.equal(later.artifacts.tensors[name], tensors[name]) for name in tensors)
    assert {path.name for path in (tmp_path / "later").iterdir()} >= {"losses-kfac-narrow_pair-0000.safetensors"}


@pytest.mark.parametrize("neurons", [*range(1, 40, 6), 176, 1536, 11008, 18944])
def test_widths_are_few_and_narrower(neurons: int) -> None:
    found = widths(neurons)
    assert len(found) <= 5
    assert list(found) == sorted({*found}, reverse=True)
    assert all(0 < width < neurons for width in found)
    assert neurons < 512 or all(width % 64 == 0 for width in found)


@pytest.mark.parametrize("name", ["narrow_pair:", "narrow_pair:0", "narrow_pair:1.5"])
def test_what_is_no_width(name: str) -> None:
    with pytest.raises(PlanError, match=r"form narrow_pair:.*expected narrow_pair:N with a number of neurons"):
        form_named(name)
