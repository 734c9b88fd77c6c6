"""Attention with shorter value vectors: directions of removal, loss of each length, and compensated weights.

Attention mixes value vectors linearly: for head h of group g the input of o_proj is z_h = P_h V_g x, whatever the
mixture P_h. So v_proj may output any projection of its group's vectors, and o_proj may be re-solved for the rest of all
heads. The directions are those of the largest eigenvalues of B C, with C the sum of the group's second moments
E[z_h z_h^T] and B = sum of O_h^T G O_h, the best subspace where the heads of a group have equal moments. The loss of a
length is exact for the directions: optimal brain surgeon (LLM Surgeon, arXiv 2312.17244), one neuron of each head at
a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gac.core.linalg import cholesky, eigh
from gac.forms.curvature.metric import FACTOR, MeasuredWeight, Metric
from gac.forms.loss_curves import LossCurve
from gac.forms.narrow.elimination import compensated
from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm, bias_of
from gac.models.sites import Weight


@dataclass(frozen=True, eq=False)
class ShortenedValues:
    """Every length at once.

    Attributes:
        directions: basis of a group's vectors, the most valuable first, shape
            ``(groups, head_dim, head_dim)``; float64.
        output: o_proj in that basis, shape ``(out, heads, head_dim)``.
        inputs: their second moments, shape ``(heads * head_dim, heads * head_dim)``; None: o_proj is not re-solved.
        curve: loss of each length, nats a token.
    """

    directions: Tensor
    output: Tensor
    inputs: Tensor | None
    curve: LossCurve

    def values(self, matrix: Tensor, length: int) -> Tensor:
        """Rows of v_proj (its weight or its bias, ``(groups * head_dim, ...)``) at a length, group after group."""
        groups = matrix.detach().double().reshape(*self.directions.shape[:2], *matrix.shape[1:])
        return torch.einsum("gld,gd...->gl...", self.directions[:, :length], groups).flatten(0, 1)

    def outputs(self, length: int, metric: Metric) -> Tensor:
        """o_proj at a length, re-solved for it where ``inputs`` are known: ``(out, heads * length)``."""
        if self.inputs is None:
            return self.output[:, :, :length].flatten(1)
        heads, head_dim = self.output.shape[1:]
        columns = (torch.arange(heads)[:, None] * head_dim + torch.arange(length)).flatten().to(self.output.device)
        return compensated(self.output.flatten(1), columns, Metric(self.inputs, metric.gradients))


def shorten_values(output: Tensor, metric: Metric, heads: int, groups: int) -> ShortenedValues:
    """Order the value dims of every group of heads.

    ``output`` is o_proj's weight, ``(out, heads * head_dim)``. Query head h reads the values of group
    ``h // (heads // groups)``.
    """
    head_dim = output.shape[1] // heads
    weight = output.detach().double().reshape(-1, heads, head_dim)
    moments = metric.inputs.reshape(heads, head_dim, heads, head_dim)
    inward, outward = [], []
    for members in torch.arange(heads, device=weight.device).view(groups, -1):
        second = torch.stack([moments[head, :, head] for head in members]).sum(0)
        loss = torch.stack([weight[:, head].T @ metric.gradients @ weight[:, head] for head in members]).sum(0)
        root = cholesky(second)
        _, vectors = eigh(root.T @ loss @ root)
        inward.append(torch.linalg.solve_triangular(root.T, vectors, upper=True).T)
        outward.append(root @ vectors)
    directions, back = torch.stack(inward), torch.stack(outward)
    by_head = directions.repeat_interleave(heads // groups, 0)
    inputs = _in_directions(moments, by_head)
    rotated = torch.einsum("ohd,hdl->ohl", weight, back.repeat_interleave(heads // groups, 0))
    return ShortenedValues(directions, rotated, inputs, _curve(rotated, inputs, metric))


def _in_directions(moments: Tensor, by_head: Tensor) -> Tensor:
    """Moments of what v_proj writes along the directions, shape ``(heads * head_dim, heads * head_dim)``."""
    half_turned = torch.einsum("hld,hdie->hlie", by_head, moments)
    turned = torch.einsum("hlie,ime->hlim", half_turned, by_head)
    return turned.flatten(2).flatten(0, 1)


def _curve(weight: Tensor, inputs: Tensor, metric: Metric) -> LossCurve:
    """Losses of the last dims of all heads, then the last two, and so on.

    Removing the set S and re-solving for the rest loses tr(C_SS (H_SS)^-1), with H = A^-1 and C = W^T G W. With S first
    in the order of the Cholesky factor H = L L^T that is a running sum over the diagonal of L^-1 C L^-T.
    """
    heads, head_dim = weight.shape[1:]
    last_first = torch.arange(heads * head_dim, device=weight.device).view(heads, head_dim).T.flip(0).flatten()
    flat = weight.flatten(1)[:, last_first]
    root = cholesky(torch.cholesky_inverse(cholesky(inputs[last_first][:, last_first])))
    half = torch.linalg.solve_triangular(root, flat.T @ metric.gradients @ flat, upper=False)
    steps = torch.linalg.solve_triangular(root, half.T, upper=False).diagonal().clamp_min(0)
    lost = steps.view(head_dim, heads).sum(1).cumsum(0).cpu().numpy()
    return LossCurve(FACTOR * np.append(lost[::-1], 0.0))


class HeadDimTensors(TensorForm):
    """Keeps the moments that the method uses: o_proj's, and v_proj's too where it folds."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for output in (weight for weight in weights if weight.values == "in"):
            measured = [_value_weight(weights), output] if statistics.method.folds else [output]
            yield Fit(output, _shortened(statistics, weights, output).curve.loss, moments=measured)

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        linear = build.linear(weight)
        output = next(other for other in build.weights if other.values == "in")
        if "values" not in build.cache:
            build.cache["values"] = _shortened(build.statistics, build.weights, output)
        values: ShortenedValues = build.cache["values"]
        if weight is output:
            return {"weight": values.outputs(dim, build.statistics.metric(weight))} | bias_of(linear)
        return {name: values.values(rows, dim) for name, rows in linear.named_parameters()}


def _value_weight(weights: Sequence[Weight]) -> Weight:
    return next(weight for weight in weights if weight.values == "out")


def _shortened(statistics: Statistics, weights: Sequence[Weight], output: Weight) -> ShortenedValues:
    values, matrix = _value_weight(weights), statistics.matrix(output)
    if statistics.method.folds:
        measured = MeasuredWeight(statistics.matrix(values), statistics.metric(values))
        return statistics.method.fold(measured, matrix, output.heads, values.heads)
    return shorten_values(matrix, statistics.metric(output), output.heads, values.heads)
