"""Moments from little text: what they show of directions that the same text chose, and that other text chose."""

import pytest
import torch
from torch import Tensor

from gac.core.linalg import damped
from gac.forms.curvature.methods import LARGEST_CROSS_FITTED, UNCROSSED, Kfac
from gac.forms.curvature.metric import Halves, Metric
from gac.forms.decomposition import decompose
from gac.testing.methods import loss_of

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


def test_a_cross_fitted_moment_has_the_trace_of_the_whole_text_and_no_negative_eigenvalue() -> None:
    drawn = halves(1)
    crossed = drawn.cross_fitted()
    assert torch.allclose(crossed.trace(), drawn.mean().trace(), rtol=1e-5)
    assert torch.linalg.eigvalsh(crossed.double()).min() > 0


def test_halves_that_agree_are_what_they_are() -> None:
    drawn = halves(1)
    assert torch.allclose(Halves(drawn.first, drawn.first.clone(), 0.5).cross_fitted(), drawn.first, atol=1e-5)


def test_the_mean_counts_each_half_by_its_share() -> None:
    drawn = halves(1)
    assert torch.allclose(Halves(drawn.first, drawn.second, 0.75).mean(), 0.75 * drawn.first + 0.25 * drawn.second)


def test_one_window_is_damped_instead() -> None:
    first = halves(1).first
    assert torch.equal(Kfac().pooled(Halves(first, None, 1.0)), damped(first, *UNCROSSED).float())


def test_a_moment_too_large_for_its_eigenvectors_is_damped_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = halves(1)
    assert SIZE < LARGEST_CROSS_FITTED
    monkeypatch.setattr("gac.forms.curvature.methods.LARGEST_CROSS_FITTED", SIZE - 1)
    assert torch.equal(Kfac().pooled(drawn), damped(drawn.mean(), *UNCROSSED).float())
