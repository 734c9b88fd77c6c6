"""The contract of a method."""

import torch
from torch import Tensor

from gac.forms import FORMS
from gac.forms.curvature.methods import Method
from gac.forms.curvature.metric import FACTOR, MeasuredWeight, Metric, Moments
from gac.forms.curvature.registry import METHODS
from gac.forms.decomposition import decompose

_RANKS = (1, 7, 15, 16)
_SCALES = {"plain": 1.0, "nothing seen": 0.0, "tiny": 1e-8, "huge": 1e8}
KINDS = (*_SCALES, "ill-conditioned", "one token", "rank 3", "dead inputs", "one huge feature")


def check_method(method: Method) -> None:
    """Refuse a method whose metric cannot measure errors, or that is not what its attributes say.

    For weights of two shapes and statistics from plain to all zero: both sides of the metric are symmetric, positive
    definite and float64, and the same when asked again; statistics are left alone; the factors of every rank lose what
    the curve says, and those of the full rank lose nothing.

    Raises:
        AssertionError: says what does not hold, for which statistics.
        GacError: the registry refuses the method.
    """
    METHODS.check(method)
    unknown = [name for name in method.forms if FORMS.name(name) != name]
    assert not unknown, f"{method.name}.forms has {unknown}, which are not written as their forms write themselves"
    for kind in KINDS:
        for out, inside in ((24, 16), (16, 24)):
            _check_metric(method, statistics(kind, out, inside), f"{method.name} for statistics {kind!r}")
    gradients = method.gradients(statistics("plain"))
    alike = torch.allclose(gradients, gradients.diagonal().mean() * torch.eye(len(gradients), dtype=torch.float64))
    assert method.two_sided != alike, f"{method.name}.two_sided is {method.two_sided}, its gradients say otherwise"
    if method.folds:
        _check_fold(method)


def _check_metric(method: Method, moments: Moments, of: str) -> None:
    before = [tensor.clone() for tensor in (moments.inputs, moments.gradients, moments.scale)]
    metric, again = method.metric(moments), method.metric(moments)
    for name, side, other, moment in (
        ("inputs", metric.inputs, again.inputs, moments.inputs),
        ("gradients", metric.gradients, again.gradients, moments.gradients),
    ):
        assert side.dtype == torch.float64, f"{of}: {name} are {side.dtype}, not float64"
        assert side.shape == moment.shape, f"{of}: {name} have shape {tuple(side.shape)}, not {tuple(moment.shape)}"
        assert bool(torch.isfinite(side).all()), f"{of}: {name} are not finite"
        assert torch.allclose(side, side.T, rtol=1e-6, atol=0), f"{of}: {name} are not symmetric"
        assert torch.equal(side, other), f"{of}: {name} are others when asked again"
    unchanged = all(
        torch.equal(tensor, other)
        for tensor, other in zip(before, (moments.inputs, moments.gradients, moments.scale), strict=True)
    )
    assert unchanged, f"{of}: the statistics themselves were changed"
    if metric.inputs.any() and metric.gradients.any():  # elsewhere nothing that is lost counts
        _check_curve(metric, of)


def _check_curve(metric: Metric, of: str) -> None:
    out, inside = len(metric.gradients), len(metric.inputs)
    weight = torch.randn(out, inside, generator=torch.Generator().manual_seed(1))
    decomposition = decompose(weight, metric)
    loss = decomposition.curve.loss
    assert loss[-1] == 0, f"{of}: the full rank loses {loss[-1]} nats a token"
    assert bool((loss[:-1] >= loss[1:]).all()), f"{of}: a larger rank loses more than a smaller one"
    for rank in _RANKS:
        second, first = decomposition.factors(rank)
        lost, said = loss_of(weight, second @ first, metric), loss[rank]
        close = abs(lost - said) <= 1e-6 * abs(said) + 1e-9 * loss[0]
        assert close, f"{of}: rank {rank} loses {lost:.6g} nats a token, its curve says {said:.6g}"


def loss_of(weight: Tensor, other: Tensor, metric: Metric) -> float:
    """Loss of another matrix in the weight's place, nats a token: ``FACTOR tr(G E A E^T)``."""
    error = weight.double() - other
    return FACTOR * float(metric.cost(error))


def _check_fold(method: Method) -> None:
    heads, groups, length, inside = 4, 2, 4, 16
    draw = torch.Generator().manual_seed(2)
    values = torch.randn(groups * length, inside, generator=draw)
    output = torch.randn(24, heads * length, generator=draw)
    metric = method.metric(statistics("plain", groups * length, inside))
    folded_values = method.fold(MeasuredWeight(values, metric), output, heads, groups)
    lengths = len(folded_values.curve.loss) - 1
    assert lengths == length, f"{method.name}: folded values have {lengths} lengths, not {length}"
    dense = _through(values, output, heads, groups)
    folded = _through(folded_values.values(values, length), folded_values.outputs(length, metric), heads, groups)
    assert torch.allclose(dense, folded, atol=1e-5), f"{method.name}: folding at the full length changes the output"


def _through(values: Tensor, output: Tensor, heads: int, groups: int) -> Tensor:
    by_group = values.double().view(groups, -1, values.shape[1]).repeat_interleave(heads // groups, 0)
    return output.double().view(len(output), heads, -1).transpose(0, 1) @ by_group


def moments_of(inputs: Tensor, gradients: Tensor) -> Moments:
    """Of activations ``(tokens, in)`` and gradients ``(tokens, out)``."""
    return Moments(
        (inputs.T @ inputs / len(inputs)).float(),
        (gradients.T @ gradients / len(gradients)).float(),
        inputs.abs().mean(0).float(),
    )


def statistics(kind: str, outs: int = 24, ins: int = 16) -> Moments:
    """One of ``KINDS``; the same every time."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, ins, generator=draw, dtype=torch.float64)
    g = torch.randn(512, outs, generator=draw, dtype=torch.float64)
    if kind == "ill-conditioned":
        x, g = x * torch.logspace(0, -12, ins), g * torch.logspace(-9, 0, outs)
    elif kind == "one token":
        x, g = x[:1], g[:1]
    elif kind == "rank 3":
        x = x[:, :3] @ torch.randn(3, ins, generator=draw, dtype=torch.float64)
    elif kind == "dead inputs":
        x[:, ::2] = 0
    elif kind == "one huge feature":
        x[:, 5] *= 1e6
    scale = _SCALES.get(kind, 1.0)
    return moments_of(scale * x, scale * g)
