"""Shorter value vectors against their definition."""

import pytest
import torch
from torch import Tensor

from gac.forms.curvature.metric import Metric
from gac.forms.head_dim.torch import ShortenedValues, shorten_values
from gac.forms.narrow.elimination import compensated
from gac.testing.methods import loss_of

HEADS, GROUPS, HEAD_DIM, OUT = 6, 3, 8, 20


def problem(within: int = HEAD_DIM) -> tuple[Tensor, Metric]:
    """o_proj and its metric; the values of each group lie in as many directions as ``within`` says."""
    torch.manual_seed(0)
    rows = torch.randn(500, HEADS, within, dtype=torch.float64)
    span = torch.randn(GROUPS, within, HEAD_DIM, dtype=torch.float64).repeat_interleave(HEADS // GROUPS, 0)
    read = torch.einsum("nhw,hwd->nhd", rows, span).flatten(1)
    gradients = torch.randn(100, OUT, dtype=torch.float64) @ torch.randn(OUT, OUT, dtype=torch.float64)
    weight = torch.randn(OUT, HEADS * HEAD_DIM, dtype=torch.float64)
    return weight, Metric(read.T @ read / 500, gradients.T @ gradients / 100)


def loss_at(weight: Tensor, metric: Metric, found: ShortenedValues, length: int) -> float:
    """Of o_proj after v_proj, set beside the dense one."""
    of_head = found.directions.repeat_interleave(HEADS // GROUPS, 0)[:, :length]
    return loss_of(weight, found.outputs(length, metric) @ torch.block_diag(*of_head), metric)


@pytest.mark.parametrize("length", [1, 4, HEAD_DIM - 1])
def test_the_curve_is_the_loss_of_the_resolved_weight(length: int) -> None:
    weight, metric = problem()
    found = shorten_values(weight, metric, HEADS, GROUPS)
    assert loss_at(weight, metric, found, length) == pytest.approx(found.curve.loss[length], rel=1e-8)


def test_values_that_lie_in_few_directions_need_no_more() -> None:
    weight, metric = problem(within=3)
    loss = shorten_values(weight, metric, HEADS, GROUPS).curve.loss
    assert loss[3] < 1e-6 * loss[0]
    assert loss[2] > 1e-3 * loss[0]


def test_the_directions_are_better_than_the_first_dims() -> None:
    weight, metric = problem()
    loss = shorten_values(weight, metric, HEADS, GROUPS).curve.loss
    kept = (torch.arange(HEADS)[:, None] * HEAD_DIM + torch.arange(4)).flatten()
    first = torch.zeros_like(weight)
    first[:, kept] = compensated(weight, kept, metric)
    assert loss[4] < loss_of(weight, first, metric)


def test_v_proj_writes_the_directions_of_its_group() -> None:
    weight, metric = problem()
    found = shorten_values(weight, metric, HEADS, GROUPS)
    matrix, bias = torch.randn(GROUPS * HEAD_DIM, 12), torch.randn(GROUPS * HEAD_DIM)
    shorter = found.values(matrix, 5)
    assert shorter.shape == (GROUPS * 5, 12)
    last = found.directions[2, :5] @ matrix[2 * HEAD_DIM :].double()
    assert torch.allclose(shorter[10:], last)
    assert torch.allclose(found.values(bias, 5)[10:], found.directions[2, :5] @ bias[2 * HEAD_DIM :].double())
