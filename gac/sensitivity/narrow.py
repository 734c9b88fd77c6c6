"""Narrower MLPs: the order in which neurons go, what each width loses, and the weights that make up for it.

Optimal brain surgeon on the input of down_proj (LLM Surgeon, arXiv 2312.17244; the layer-wise form is OBC,
arXiv 2208.11580): removing neuron j costs ``w_j^T G w_j / [A^-1]_jj`` once the rest is re-solved.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gac.sensitivity.linalg import cholesky, one_thread
from gac.sensitivity.methods import FACTOR, Metric
from gac.sites import LossCurve

BLOCK = 128


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
    state = _State(inverse, weight.T @ metric.gradients @ weight)
    for start in range(0, len(inverse), BLOCK):
        with one_thread():
            steps, crosses, norms = state.remove(min(BLOCK, len(inverse) - start))
        state.update(steps, crosses, norms)
    loss = np.concatenate([[0.0], np.cumsum(torch.stack(state.losses).cpu().numpy())])
    return Elimination(torch.stack(state.order), LossCurve(FACTOR * loss[::-1].copy()))


class _State:
    """H and C as of the last whole block, their diagonals as of the last neuron, and what went so far."""

    def __init__(self, inverse: Tensor, gram: Tensor) -> None:
        self.inverse, self.gram = inverse, gram
        self.diagonal, self.quadratic = inverse.diagonal().clone(), gram.diagonal().clone()
        self.alive = torch.ones(len(inverse), dtype=torch.bool, device=inverse.device)
        self.order: list[Tensor] = []
        self.losses: list[Tensor] = []

    def remove(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Take out ``size`` neurons; returns their l and c ``(neurons, size)`` and |t|^2 ``(size,)``."""
        steps = self.inverse.new_zeros(len(self.inverse), size)
        crosses, norms = torch.zeros_like(steps), steps.new_zeros(size)
        for i in range(size):
            score = torch.where(self.alive, self.quadratic / self.diagonal, torch.inf)
            j = score.argmin()
            scale = self.diagonal[j].sqrt()
            row, cross = steps[j, :i], crosses[j, :i]
            step = (self.inverse[j] - steps[:, :i] @ row) / scale
            column = self.gram[j] - steps[:, :i] @ (cross - norms[:i] * row) - crosses[:, :i] @ row
            steps[:, i], crosses[:, i] = step, column / scale
            norms[i] = self.quadratic[j] / self.diagonal[j]
            self.order.append(j)
            self.losses.append(score[j])
            self.alive[j] = False
            self.quadratic = (self.quadratic - 2 * step * crosses[:, i] + norms[i] * step**2).clamp_min(0)
            self.diagonal = (self.diagonal - step**2).clamp_min(torch.finfo(torch.float64).tiny)
        return steps, crosses, norms

    def update(self, steps: Tensor, crosses: Tensor, norms: Tensor) -> None:
        """Bring H and C up to date with a block."""
        self.inverse -= steps @ steps.T
        both = steps @ crosses.T
        self.gram -= both + both.T - (steps * norms) @ steps.T


def compensated(down: Tensor, kept: Tensor, metric: Metric) -> Tensor:
    """The columns of down_proj that stay, re-solved for those that went: ``W A[:, K] A[K, K]^-1``.

    Shape ``(out, kept)``, float64; the least-squares solution in the metric of the inputs.
    """
    inputs = metric.inputs
    right = inputs[kept] @ down.detach().double().T
    return torch.cholesky_solve(right, cholesky(inputs[kept][:, kept])).T
