"""Shorter weights against their definition: fewer neurons, pairs inside a narrower MLP, and shorter value vectors."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gac.core.errors import PlanError
from gac.forms import form_named
from gac.forms.curvature.metric import Metric
from gac.forms.curvature.registry import METHODS
from gac.forms.head_dim.torch import shorten_values
from gac.forms.narrow.elimination import compensated, eliminate, last_to_go
from gac.forms.narrow_pair import widths
from gac.forms.tensors import SiteBuild, Statistics, tensors_of
from gac.measurement.calibration import CalibrationRun, stream_moments
from gac.measurement.curves import LayerFit, fit_layers
from gac.measurement.store import StatisticsStore
from gac.models.families import family_of
from gac.models.sites import Site, Weight
from gac.testing.methods import loss_of
from tests.models.small import NEURONS, small_config, small_model


def problem(out: int = 10, neurons: int = 70) -> tuple[Tensor, Metric]:
    torch.manual_seed(0)
    weight = torch.randn(out, neurons, dtype=torch.float64)
    mix = torch.randn(neurons, neurons, dtype=torch.float64) * torch.logspace(0, -1, neurons, dtype=torch.float64)
    rows = torch.randn(500, neurons, dtype=torch.float64) @ mix
    gradients = torch.randn(100, out, dtype=torch.float64)
    return weight, Metric(rows.T @ rows / 500, gradients.T @ gradients / 100)


def loss_at(weight: Tensor, kept: Tensor, metric: Metric) -> float:
    smaller = torch.zeros_like(weight)
    smaller[:, kept] = compensated(weight, kept, metric)
    return loss_of(weight, smaller, metric)


def test_the_curve_is_the_loss_of_the_compensated_weight_and_each_step_the_least() -> None:
    weight, metric = problem()
    result = eliminate(weight, metric)
    for width in (69, 37, 1):
        kept = last_to_go(result.order, width)
        assert len(kept) == width
        assert loss_at(weight, kept, metric) == pytest.approx(result.curve.loss[width], rel=1e-9)
    weight, metric = problem(neurons=12)
    order = eliminate(weight, metric).order.tolist()
    alive = list(range(12))
    for removed in order[:11]:
        costs = {j: loss_at(weight, torch.tensor([i for i in alive if i != j]), metric) for j in alive}
        assert removed == min(costs, key=costs.__getitem__)
        alive.remove(removed)


def test_a_duplicate_neuron_costs_nothing_once_its_twin_takes_over() -> None:
    weight, metric = problem()
    inputs = metric.inputs.clone()
    inputs[:, 3] = inputs[:, 5]
    inputs[3] = inputs[5]
    found = eliminate(weight, Metric(inputs + 1e-9 * torch.eye(70), metric.gradients))
    assert found.order[0].item() in (3, 5)
    assert found.curve.loss[69] < 1e-6 * found.curve.loss[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="replays a CUDA graph")
def test_a_gpu_removes_the_same_neurons() -> None:
    weight, metric = problem(neurons=200)
    ours = eliminate(weight.cuda(), Metric(metric.inputs.cuda(), metric.gradients.cuda()))
    theirs = eliminate(weight, metric)
    assert torch.equal(ours.order.cpu(), theirs.order)
    assert np.allclose(ours.curve.loss, theirs.curve.loss, rtol=1e-9)


HEADS, GROUPS, HEAD_DIM, OUT = 6, 3, 8, 20


def values_problem(within: int = HEAD_DIM) -> tuple[Tensor, Metric]:
    """o_proj and its metric; the values of each group lie in as many directions as ``within`` says."""
    torch.manual_seed(0)
    rows = torch.randn(500, HEADS, within, dtype=torch.float64)
    span = torch.randn(GROUPS, within, HEAD_DIM, dtype=torch.float64).repeat_interleave(HEADS // GROUPS, 0)
    read = torch.einsum("nhw,hwd->nhd", rows, span).flatten(1)
    gradients = torch.randn(100, OUT, dtype=torch.float64) @ torch.randn(OUT, OUT, dtype=torch.float64)
    weight = torch.randn(OUT, HEADS * HEAD_DIM, dtype=torch.float64)
    return weight, Metric(read.T @ read / 500, gradients.T @ gradients / 100)


def test_the_curve_is_the_loss_of_the_resolved_weight() -> None:
    weight, metric = values_problem()
    result = shorten_values(weight, metric, HEADS, GROUPS)
    for length in (1, 4, HEAD_DIM - 1):
        of_head = result.directions.repeat_interleave(HEADS // GROUPS, 0)[:, :length]
        lost = loss_of(weight, result.outputs(length, metric) @ torch.block_diag(*of_head), metric)
        assert lost == pytest.approx(result.curve.loss[length], rel=1e-8)


def test_values_in_few_directions_need_no_more_and_directions_are_better_than_the_first_dims() -> None:
    weight, metric = values_problem(within=3)
    loss = shorten_values(weight, metric, HEADS, GROUPS).curve.loss
    assert loss[3] < 1e-6 * loss[0]
    assert loss[2] > 1e-3 * loss[0]
    weight, metric = values_problem()
    loss = shorten_values(weight, metric, HEADS, GROUPS).curve.loss
    kept = (torch.arange(HEADS)[:, None] * HEAD_DIM + torch.arange(4)).flatten()
    first = torch.zeros_like(weight)
    first[:, kept] = compensated(weight, kept, metric)
    assert loss[4] < loss_of(weight, first, metric)


def test_v_proj_writes_the_directions_of_its_group() -> None:
    weight, metric = values_problem()
    found = shorten_values(weight, metric, HEADS, GROUPS)
    matrix, bias = torch.randn(GROUPS * HEAD_DIM, 12), torch.randn(GROUPS * HEAD_DIM)
    shorter = found.values(matrix, 5)
    assert shorter.shape == (GROUPS * 5, 12)
    last = found.directions[2, :5] @ matrix[2 * HEAD_DIM :].double()
    assert torch.allclose(shorter[10:], last)
    assert torch.allclose(found.values(bias, 5)[10:], found.directions[2, :5] @ bias[2 * HEAD_DIM :].double())


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
    tensors = tensors_of(form_named(form))
    stay = work.artifacts.of(form_named(f"narrow_pair:{WIDTHS[2]}"), "stay", weight)
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


def test_measured_later_it_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
