"""The mathematics of the decomposition, and what methods differ in; tests/extending runs the contract of each."""

from dataclasses import replace

import pytest
import torch

from gac.core.errors import GacError, ModelError
from gac.forms.curvature.metric import FACTOR
from gac.forms.curvature.registry import METHODS
from gac.forms.decomposition import decompose
from gac.testing.methods import loss_of, statistics


def test_the_best_rank_in_the_metric_beats_plain_svd_there() -> None:
    weight = torch.randn(12, 20)
    moments = statistics("plain", 12, 20)
    metric = METHODS.get("kfac").metric(moments)
    ours = decompose(weight, metric).factors(4)
    plain = decompose(weight, METHODS.get("svd").metric(moments)).factors(4)
    assert loss_of(weight, ours[0] @ ours[1], metric) < loss_of(weight, plain[0] @ plain[1], metric)


def test_statistics_of_zero_weigh_every_direction_alike() -> None:
    weight = torch.randn(12, 20)
    moments = statistics("nothing seen", 12, 20)
    squared = torch.linalg.svdvals(weight.double()) ** 2
    loss = decompose(weight, METHODS.get("kfac").metric(moments)).curve.loss
    assert loss[5] == pytest.approx(FACTOR * float(squared[5:].sum()))


def test_the_two_factors_share_the_scale() -> None:
    second, first = decompose(torch.randn(12, 20), METHODS.get("kfac").metric(statistics("plain", 12, 20))).factors(5)
    assert torch.allclose(second.norm(dim=0), first.norm(dim=1))


def test_non_finite_statistics_are_refused() -> None:
    moments = replace(statistics("plain", 12, 20), inputs=torch.full((20, 20), torch.nan))
    with pytest.raises(ModelError, match=r"statistic is not finite"):
        decompose(torch.randn(12, 20), METHODS.get("kfac").metric(moments))


def test_asvd_scales_columns_by_their_activation() -> None:
    weight, moments = torch.randn(12, 20), statistics("plain", 12, 20)
    second, first = decompose(weight, METHODS.get("asvd").metric(moments)).factors(4)
    scale = moments.scale.double() ** 0.5
    u, s, vh = torch.linalg.svd(weight.double() * scale)
    assert torch.allclose(second @ first, (u[:, :4] * s[:4]) @ vh[:4] / scale)


def test_alpha_is_part_of_the_name() -> None:
    assert METHODS.get("asvd").name == METHODS.get("asvd:0.5").name == "asvd"
    assert METHODS.get("asvd:0.25").name == "asvd:0.25"
    assert METHODS.get("asvd:0.12345678").name == "asvd:0.12345678"
    moments = statistics("plain", 12, 20)
    metric = METHODS.get("asvd:0.25").metric(moments)
    assert torch.allclose(metric.inputs.diagonal(), moments.scale.double() ** 0.5)


@pytest.mark.parametrize("alpha", ["", "0", "1.5", "nan"])
def test_an_alpha_out_of_range_is_refused(alpha: str) -> None:
    with pytest.raises(GacError, match="expected asvd:ALPHA with alpha above 0 and at most 1"):
        METHODS.get(f"asvd:{alpha}")


def test_a_feature_that_never_fires_counts_as_the_weakest() -> None:
    moments = statistics("plain", 12, 20)
    moments.scale[3] = 0
    metric = METHODS.get("asvd").metric(moments)
    assert metric.inputs[3, 3] == moments.scale[moments.scale > 0].min().double()
    moments.scale[:] = 0
    assert torch.equal(METHODS.get("asvd").metric(moments).inputs, torch.eye(20, dtype=torch.float64))
