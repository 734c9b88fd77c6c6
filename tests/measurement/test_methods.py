"""The mathematics of the decomposition, and what methods differ in; tests/extending runs the contract of each."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gac.core.errors import GacError, ModelError
from gac.core.linalg import damped
from gac.forms.curvature.methods import UNCROSSED, Kfac
from gac.forms.curvature.metric import FACTOR, Halves, Metric
from gac.forms.curvature.registry import METHODS
from gac.forms.decomposition import decompose
from gac.forms.latent.torch import decompose_groups
from gac.testing.methods import loss_of, statistics


def test_the_best_rank_in_the_metric_beats_plain_svd_there() -> None:
    weight, moments = torch.randn(12, 20), statistics("plain", 12, 20)
    metric = METHODS.get("kfac").metric(moments)
    ours = decompose(weight, metric).factors(4)
    plain = decompose(weight, METHODS.get("svd").metric(moments)).factors(4)
    assert loss_of(weight, ours[0] @ ours[1], metric) < loss_of(weight, plain[0] @ plain[1], metric)


def test_decompositions_of_statistics_that_are_zero_plain_and_not_finite() -> None:
    weight, moments = torch.randn(12, 20), statistics("nothing seen", 12, 20)
    squared = torch.linalg.svdvals(weight.double()) ** 2
    loss = decompose(weight, METHODS.get("kfac").metric(moments)).curve.loss
    assert loss[5] == pytest.approx(FACTOR * float(squared[5:].sum()))
    second, first = decompose(torch.randn(12, 20), METHODS.get("kfac").metric(statistics("plain", 12, 20))).factors(5)
    assert torch.allclose(second.norm(dim=0), first.norm(dim=1))
    moments = replace(statistics("plain", 12, 20), inputs=torch.full((20, 20), torch.nan))
    with pytest.raises(ModelError, match=r"statistic is not finite"):
        decompose(torch.randn(12, 20), METHODS.get("kfac").metric(moments))


def test_asvd_scales_columns_by_their_activation() -> None:
    weight, moments = torch.randn(12, 20), statistics("plain", 12, 20)
    second, first = decompose(weight, METHODS.get("asvd").metric(moments)).factors(4)
    scale = moments.scale.double() ** 0.5
    u, s, vh = torch.linalg.svd(weight.double() * scale)
    assert torch.allclose(second @ first, (u[:, :4] * s[:4]) @ vh[:4] / scale)
    moments.scale[3] = 0
    metric = METHODS.get("asvd").metric(moments)
    assert metric.inputs[3, 3] == moments.scale[moments.scale > 0].min().double()
    moments.scale[:] = 0
    assert torch.equal(METHODS.get("asvd").metric(moments).inputs, torch.eye(20, dtype=torch.float64))


def test_a_parameter_is_part_of_the_name() -> None:
    assert METHODS.get("asvd").name == METHODS.get("asvd:0.5").name == "asvd"
    assert METHODS.get("asvd:0.12345678").name == "asvd:0.12345678"
    assert (METHODS.get("palu").name, METHODS.get("palu").forms) == ("palu", ("latent",))
    assert (METHODS.get("palu:2").name, METHODS.get("palu:2").forms) == ("palu:2", ("latent:2",))
    moments = statistics("plain", 12, 20)
    metric = METHODS.get("asvd:0.25").metric(moments)
    assert torch.allclose(metric.inputs.diagonal(), moments.scale.double() ** 0.5)


@pytest.mark.parametrize("parameter", ["", "0", "1.5", "nan"])
def test_a_parameter_out_of_range_is_refused(parameter: str) -> None:
    for method in ("asvd", "palu"):
        with pytest.raises(GacError, match=f"expected {method}:"):
            METHODS.get(f"{method}:{parameter}")


def test_the_curve_of_groups_is_the_sum_of_theirs() -> None:
    weight, metric = torch.randn(12, 20), METHODS.get("kfac").metric(statistics("plain", 12, 20))
    groups, curve = decompose_groups(weight, metric, 3)
    assert curve.full == 4
    blocks = [Metric(metric.inputs, metric.gradients[start : start + 4, start : start + 4]) for start in (0, 4, 8)]
    for rank in (0, 1, 3):
        products = [second @ first for second, first in (group.factors(rank) for group in groups)]
        assert curve.loss[rank] == pytest.approx(sum(map(loss_of, weight.split(4), products, blocks)), rel=1e-6)


SIZE, ROWS, RANK = 24, 96, 8
TRUE = torch.diag(0.7 ** torch.arange(SIZE, dtype=torch.float32))


def halves(seed: int) -> Halves:
    draw = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(ROWS // 2, SIZE, generator=draw) @ TRUE.sqrt() for _ in range(2))
    return Halves(first.T @ first / len(first), second.T @ second / len(second), 0.5)


def lost(inputs: Tensor, weight: Tensor) -> tuple[float, float]:
    """What a truncation is priced at in the metric that chose it, and what it loses."""
    metric = Metric(damped(inputs, 1e-3), torch.eye(SIZE, dtype=torch.float64))
    found = decompose(weight, metric)
    second, first = found.factors(RANK)
    true = Metric(TRUE.double(), metric.gradients)
    return float(found.curve.loss[RANK]), loss_of(weight, second @ first, true)


def test_what_was_cross_fitted_is_priced_honestly() -> None:
    plain, crossed = [], []
    for seed in range(20):
        weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
        drawn = halves(seed)
        plain.append(lost(drawn.mean(), weight))
        crossed.append(lost(drawn.cross_fitted(), weight))
    (priced, true), (honest, less) = (map(sum, zip(*rows, strict=True)) for rows in (plain, crossed))
    assert priced < 0.85 * true
    assert 0.95 < honest / less < 1.2
    drawn = halves(1)
    crossed = drawn.cross_fitted()
    assert torch.allclose(crossed.trace(), drawn.mean().trace(), rtol=1e-5)
    assert torch.linalg.eigvalsh(crossed.double()).min() > 0
    assert torch.allclose(Halves(drawn.first, drawn.first.clone(), 0.5).cross_fitted(), drawn.first, atol=1e-5)
    assert torch.allclose(Halves(drawn.first, drawn.second, 0.75).mean(), 0.75 * drawn.first + 0.25 * drawn.second)


def test_one_window_or_a_large_moment_is_damped_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = halves(1)
    assert torch.equal(Kfac().pooled(Halves(drawn.first, None, 1.0)), damped(drawn.first, *UNCROSSED).float())
    assert torch.equal(Kfac().pooled(drawn), drawn.cross_fitted())
    monkeypatch.setattr("gac.forms.curvature.methods.LARGEST_CROSS_FITTED", SIZE - 1)
    assert torch.equal(Kfac().pooled(drawn), damped(drawn.mean(), *UNCROSSED).float())
