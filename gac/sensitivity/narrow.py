"""Narrower MLPs: the order in which neurons go, what each width loses, and the weights that make up for it.

Optimal brain surgeon on the input of down_proj (LLM Surgeon, arXiv 2312.17244; the layer-wise form is OBC,
arXiv 2208.11580): removing neuron j costs ``w_j^T G w_j / [A^-1]_jj`` once the rest is re-solved.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gac.sensitivity.linalg import cholesky
from gac.sensitivity.methods import FACTOR, Metric
from gac.sites import LossCurve

BLOCK = 32


@dataclass(frozen=True, eq=False)
class Elimination:
    """``order[i]`` is the i-th neuron to go; ``curve.loss[w]`` what the best w neurons lose, nats a token."""

    order: Tensor
    curve: LossCurve

    def kept(self, width: int) -> Tensor:
        """Indices of the neurons that stay at a width, ascending."""
        return self.order[len(self.order) - width :].sort().values


def eliminate(down: Tensor, metric: Metric) -> Elimination:
    """Remove the neurons of down_proj ``(out, neurons)`` one at a time, always the one that costs least.

    With H = A^-1 and C = W^T G W, removing j takes the rank-one ``l l^T`` from H (l = H_j / sqrt(H_jj)) and updates C
    by ``-l c^T - c l^T + |t|^2 l l^T`` (c = C_j / sqrt(H_jj), |t|^2 = C_jj / H_jj), ``BLOCK`` updates at a time.
    """
    weight = down.detach().double()
    inverse = torch.cholesky_inverse(cholesky(metric.inputs))
    gram = weight.T @ metric.gradients @ weight
    neurons = len(inverse)
    order, losses = [], []
    alive = torch.ones(neurons, dtype=torch.bool, device=weight.device)
    diagonal, quadratic = inverse.diagonal().clone(), gram.diagonal().clone()
    for start in range(0, neurons, BLOCK):
        size = min(BLOCK, neurons - start)
        steps = inverse.new_zeros(neurons, size)
        crosses = inverse.new_zeros(neurons, size)
        norms = inverse.new_zeros(size)
        for i in range(size):
            score = torch.where(alive, quadratic / diagonal, torch.inf)
            j = score.argmin()
            scale = diagonal[j].sqrt()
            row, cross = steps[j, :i], crosses[j, :i]
            step = (inverse[j] - steps[:, :i] @ row) / scale
            column = gram[j] - steps[:, :i] @ (cross - norms[:i] * row) - crosses[:, :i] @ row
            steps[:, i], crosses[:, i], norms[i] = step, column / scale, quadratic[j] / diagonal[j]
            order.append(j)
            losses.append(score[j])
            alive[j] = False
            quadratic = (quadratic - 2 * step * crosses[:, i] + norms[i] * step**2).clamp_min(0)
            diagonal = (diagonal - step**2).clamp_min(torch.finfo(torch.float64).tiny)
        inverse -= steps @ steps.T
        both = steps @ crosses.T
        gram -= both + both.T - (steps * norms) @ steps.T
    loss = np.concatenate([[0.0], np.cumsum(torch.stack(losses).cpu().numpy())])
    return Elimination(torch.stack(order), LossCurve(FACTOR * loss[::-1].copy()))


def compensated(down: Tensor, kept: Tensor, metric: Metric) -> Tensor:
    """The columns of down_proj that stay, re-solved for those that went: ``W A[:, K] A[K, K]^-1``.

    Shape ``(out, kept)``, float64; the least-squares solution in the metric of the inputs.
    """
    inputs = metric.inputs
    right = inputs[kept] @ down.detach().double().T
    return torch.cholesky_solve(right, cholesky(inputs[kept][:, kept])).T
