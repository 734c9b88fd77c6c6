"""Optimal brain surgeon against its definition, one removal at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gac.forms.curvature.metric import Metric
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
