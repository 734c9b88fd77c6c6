"""Each group of rows by itself."""

import pytest
import torch

from gac.baselines.methods import Palu
from gac.core.errors import GacError
from gac.core.linalg import damped
from gac.forms.curvature.metric import Metric
from gac.forms.curvature.registry import METHODS
from gac.forms.latent.torch import decompose_groups
from gac.testing.methods import loss_of


@pytest.fixture
def metric() -> Metric:
    torch.manual_seed(0)
    inputs, gradients = torch.randn(80, 20), torch.randn(60, 12)
    return Metric(damped(inputs.T @ inputs / 80, 1e-6), damped(gradients.T @ gradients / 60, 1e-6))


WEIGHT = torch.randn(12, 20, generator=torch.Generator().manual_seed(1))


def test_the_curve_is_the_sum_over_the_groups(metric: Metric) -> None:
    found, curve = decompose_groups(WEIGHT, metric, 3)
    assert curve.full == 4
    blocks = [Metric(metric.inputs, metric.gradients[start : start + 4, start : start + 4]) for start in (0, 4, 8)]
    for rank in (0, 1, 3):
        products = [second @ first for second, first in (group.factors(rank) for group in found)]
        lost = sum(map(loss_of, WEIGHT.split(4), products, blocks))
        assert curve.loss[rank] == pytest.approx(lost, rel=1e-6)


def test_the_size_of_a_group_is_part_of_the_methods_name() -> None:
    assert (METHODS.get("palu").name, METHODS.get("palu").forms) == ("palu", ("latent",))
    assert (METHODS.get("palu:2").name, METHODS.get("palu:2").forms) == ("palu:2", ("latent:2",))
    assert Palu(4).name == "palu"


@pytest.mark.parametrize("group", ["", "0", "1.5"])
def test_a_group_of_no_heads_is_refused(group: str) -> None:
    with pytest.raises(GacError, match="expected palu:N with a number of heads of 1 or more"):
        METHODS.get(f"palu:{group}")
