"""Narrower MLPs: order of removal of neurons, loss of each width, and compensated weights.

Optimal brain surgeon on the input of down_proj (LLM Surgeon, arXiv 2312.17244; the layer-wise form is OBC,
arXiv 2208.11580): removing neuron j costs ``w_j^T G w_j / [A^-1]_jj`` once the rest is re-solved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gac.core.linalg import cholesky, single_thread
from gac.forms.curvature.metric import FACTOR, Metric
from gac.forms.loss_curves import LossCurve

BLOCK = 64
SHRINK = 256
"""Neurons after which a CPU frees their rows and columns; a multiple of ``BLOCK``."""


@dataclass(frozen=True, eq=False)
class Elimination:
    """``order[i]`` is the i-th neuron removed; ``curve.loss[w]`` the loss with the best w neurons, nats a token."""

    order: Tensor
    curve: LossCurve


def last_to_go(order: Tensor, width: int) -> Tensor:
    """Indices of the neurons that stay at a width, ascending: the ``width`` removed last."""
    return order[len(order) - width :].sort().values


def eliminate(down: Tensor, metric: Metric) -> Elimination:
    """Remove the neurons of down_proj ``(out, neurons)`` one at a time, always the one that costs least.

    With H = A^-1 and C = W^T G W, removing j takes the rank-one ``l l^T`` from H (l = H_j / sqrt(H_jj)) and
    ``l d^T + d l^T`` from C (d = C_j / sqrt(H_jj) - l C_jj / (2 H_jj)), ``BLOCK`` updates at a time.
    """
    weight = down.detach().double()
    inverse = torch.cholesky_inverse(cholesky(metric.inputs))
    state = _State(inverse, weight.T @ metric.gradients @ weight)
    with single_thread():
        state.remove()  # once before the capture, so that everything is loaded
        remove = _captured(state.remove, inverse.device)
    for start in range(0, len(inverse), BLOCK):
        with single_thread():
            for _ in range(max(start, 1), min(start + BLOCK, len(inverse))):
                remove()
        state.update()
        if inverse.device.type == "cpu" and (start + BLOCK) % SHRINK == 0:  # captured tensors must not move
            state.shrink()
    loss = np.concatenate([[0.0], np.cumsum(state.losses.cpu().numpy())])
    return Elimination(state.order, LossCurve(FACTOR * loss[::-1].copy()))


def _captured(step: Callable[[], None], device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(device),
        torch.cuda.graph(graph, stream=_capture_stream(device), capture_error_mode="thread_local"),
    ):
        step()
    return graph.replay


@cache
def _capture_stream(device: torch.device) -> Any:
    # One per GPU: cuBLAS keeps a workspace for each stream that it has seen.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _State:
    """H and C as of the last full block, their diagonals as of the last neuron, and the order so far.

    Indices and counts stay on the device: a step never waits for it, so it can be replayed.

    Attributes:
        pending: l of the block's neurons, and then their d, shape ``(2 * BLOCK, neurons)``; 0 for the rest.
        order: neurons in the order of removal.
        losses: cost of each.
    """

    def __init__(self, inverse: Tensor, gram: Tensor) -> None:
        count, device = len(inverse), inverse.device
        self._inverse, self._gram = inverse, gram
        self._diagonal, self._quadratic = inverse.diagonal().clone(), gram.diagonal().clone()
        self.pending = inverse.new_zeros(2 * BLOCK, count)
        self.order = torch.zeros(count, dtype=torch.int64, device=device)
        self.losses = inverse.new_zeros(count)
        self._removed = torch.zeros(1, dtype=torch.int64, device=device)
        self._row = torch.zeros(1, dtype=torch.int64, device=device)
        self._numbers = torch.arange(count, device=device)  # of the neurons that H and C have

    def remove(self) -> None:
        cost, j = (self._quadratic / self._diagonal).min(0, keepdim=True)
        scale = self._diagonal.index_select(0, j).rsqrt()
        steps, halves = self.pending[:BLOCK], self.pending[BLOCK:]
        column = self.pending.index_select(1, j).view(2, BLOCK)
        step = torch.addmv(self._inverse.index_select(0, j)[0], steps.T, column[0], alpha=-1).mul_(scale)
        half = torch.addmv(self._gram.index_select(0, j)[0], self.pending.T, column.flip(0).view(-1), alpha=-1).mul_(
            scale
        )
        half -= step * (cost / 2)
        steps.index_copy_(0, self._row, step[None])
        halves.index_copy_(0, self._row, half[None])
        self._quadratic.addcmul_(step, half, value=-2).clamp_min_(0)
        self._quadratic.index_fill_(0, j, torch.inf)  # never again the cheapest
        self._diagonal.addcmul_(step, step, value=-1).clamp_min_(torch.finfo(torch.float64).tiny)
        self.order.index_copy_(0, self._removed, self._numbers.index_select(0, j))
        self.losses.index_copy_(0, self._removed, cost)
        self._removed += 1
        self._row += 1

    def update(self) -> None:
        """Bring H and C up to date with a block."""
        steps, halves = self.pending[:BLOCK], self.pending[BLOCK:]
        self._inverse.addmm_(steps.T, steps, alpha=-1)
        self._gram.addmm_(self.pending.T, torch.cat([halves, steps]), alpha=-1)
        self.pending.zero_()
        self._row.zero_()

    def shrink(self) -> None:
        """Free the rows and columns of removed neurons; call it right after ``update``."""
        stay = self._quadratic.isfinite().nonzero()[:, 0]
        self._inverse, self._gram = (matrix[stay].index_select(1, stay) for matrix in (self._inverse, self._gram))
        self._diagonal, self._quadratic, self._numbers = (
            vector[stay] for vector in (self._diagonal, self._quadratic, self._numbers)
        )
        self.pending = self.pending[:, : len(stay)].clone()


def compensated(down: Tensor, columns: Tensor, metric: Metric) -> Tensor:
    """The columns of down_proj that stay, compensated for the removed ones: ``W A[:, K] A[K, K]^-1``.

    Shape ``(out, columns)``, float64; the least-squares solution in the metric of the inputs.
    """
    inputs = metric.inputs
    right = inputs[columns] @ down.detach().double().T
    return torch.cholesky_solve(right, cholesky(inputs[columns][:, columns])).T
