"""Shorter weights against their definition: fewer neurons, one removal at a time, and shorter value vectors."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gac.forms.curvature.metric import Metric
from gac.forms.head_dim.torch import ShortenedValues, shorten_values
from gac.forms.narrow.elimination import compensated, eliminate, last_to_go
from gac.testing.methods import loss_of


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


@pytest.mark.parametrize("width", [69, 37, 1])
def test_the_curve_is_the_loss_of_the_compensated_weight(width: int) -> None:
    weight, metric = problem()
    found = eliminate(weight, metric)
    kept = last_to_go(found.order, width)
    assert len(kept) == width
    assert loss_at(weight, kept, metric) == pytest.approx(found.curve.loss[width], rel=1e-9)


def test_each_step_removes_the_neuron_that_costs_least() -> None:
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
    inputs[3, 3] = inputs[5, 5]
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


def values_loss_at(weight: Tensor, metric: Metric, found: ShortenedValues, length: int) -> float:
    """Of o_proj after v_proj, set beside the dense one."""
    of_head = found.directions.repeat_interleave(HEADS // GROUPS, 0)[:, :length]
    return loss_of(weight, found.outputs(length, metric) @ torch.block_diag(*of_head), metric)


@pytest.mark.parametrize("length", [1, 4, HEAD_DIM - 1])
def test_the_curve_is_the_loss_of_the_resolved_weight(length: int) -> None:
    weight, metric = values_problem()
    found = shorten_values(weight, metric, HEADS, GROUPS)
    assert values_loss_at(weight, metric, found, length) == pytest.approx(found.curve.loss[length], rel=1e-8)


def test_values_that_lie_in_few_directions_need_no_more() -> None:
    weight, metric = values_problem(within=3)
    loss = shorten_values(weight, metric, HEADS, GROUPS).curve.loss
    assert loss[3] < 1e-6 * loss[0]
    assert loss[2] > 1e-3 * loss[0]


def test_the_directions_are_better_than_the_first_dims() -> None:
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
