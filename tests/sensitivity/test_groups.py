"""Each group of rows by itself."""

import pytest
import torch

from gac.baselines.methods import Palu
from gac.errors import GacError
from gac.forms.decomposition import decompose
from gac.forms.grouped.torch import decompose_groups
from gac.forms.metric import FACTOR, Metric
from gac.linalg import damped
from gac.sensitivity.registry import METHODS


@pytest.fixture
def metric() -> Metric:
    torch.manual_seed(0)
    inputs, gradients = torch.randn(80, 20), torch.randn(60, 12)
    return Metric(damped(inputs.T @ inputs / 80, 1e-6), damped(gradients.T @ gradients / 60, 1e-6))


WEIGHT = torch.randn(12, 20, generator=torch.Generator().manual_seed(1))


def test_the_curve_is_the_sum_over_the_groups(metric: Metric) -> None:
    found = decompose_groups(WEIGHT, metric, 3)
    assert found.curve.full == 4
    for rank in (0, 1, 3):
        second, first = found.factors(rank)
        errors = (WEIGHT.double() - torch.block_diag(*second) @ first).view(3, 4, 20)
        blocks = [metric.gradients[start : start + 4, start : start + 4] for start in (0, 4, 8)]
        lost = sum(
            torch.trace(block @ error @ metric.inputs @ error.T) for block, error in zip(blocks, errors, strict=True)
        )
        assert found.curve.loss[rank] == pytest.approx(FACTOR * float(lost), rel=1e-6)


def test_one_group_is_the_whole_weight(metric: Metric) -> None:
    whole, grouped = decompose(WEIGHT, metric), decompose_groups(WEIGHT, metric, 1)
    assert grouped.curve.loss.tolist() == whole.curve.loss.tolist()
    second, first = whole.factors(5)
    assert torch.equal(grouped.factors(5)[0][0], second)
    assert torch.equal(grouped.factors(5)[1], first)


def test_the_size_of_a_group_is_part_of_the_methods_name() -> None:
    assert (METHODS.get("palu").name, METHODS.get("palu").forms) == ("palu", ("grouped",))
    assert (METHODS.get("palu:2").name, METHODS.get("palu:2").forms) == ("palu:2", ("grouped:2",))
    assert Palu(4).name == "palu"


@pytest.mark.parametrize("group", ["", "0", "-2", "two", "1.5"])
def test_a_group_of_no_heads_is_refused(group: str) -> None:
    with pytest.raises(GacError) as caught:
        METHODS.get(f"palu:{group}")
    assert str(caught.value) == (
        f"method palu:{group}; expected palu:N with a number of heads of 1 or more. Write it like palu:4."
    )
