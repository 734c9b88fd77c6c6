"""Narrower experts: the order in which the neurons of each expert go, and the parameters of those that stay.

Optimal brain surgeon on the input of down_proj, as in ``gac.forms.narrow.elimination``, for all experts of a layer at
once: an expert has few neurons, and a layer may have hundreds of experts.
"""

from typing import Any

import torch
from torch import Tensor

from gac.core.linalg import cholesky

PRIOR = 16
"""Tokens with the mean moment of the layer that each expert is taken to have seen beside those that reach it."""


def neuron_order(moments: Tensor, reached: Tensor, down: Tensor, gradients: Tensor, least: int) -> Tensor:
    """Return the neurons of each expert in the order of removal, shape ``(experts, neurons)``.

    The last ``least`` of a row are in no order. ``moments (experts, neurons, neurons)`` are sums over the ``reached``
    tokens of each, ``down (experts, neurons, hidden)``, ``gradients (hidden, hidden)``.
    """
    per_token = moments.sum(0) / reached.sum().clamp_min(1)
    moments = moments + PRIOR * per_token
    level = moments.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(moments.dtype).tiny)
    moments.diagonal(dim1=1, dim2=2).add_(1e-4 * level[:, None])
    inverse = torch.cholesky_inverse(torch.stack([cholesky(moment) for moment in moments]))
    gram = down @ gradients @ down.mT
    experts, neurons = torch.arange(len(down), device=down.device), down.shape[1]
    order, gone = torch.empty(down.shape[:2], dtype=torch.int64, device=down.device), torch.zeros_like(down[..., 0])
    for turn in range(neurons - least):
        diagonal, quadratic = (matrix.diagonal(dim1=1, dim2=2) for matrix in (inverse, gram))
        cost, j = (quadratic.clamp_min(0) / diagonal.clamp_min(1e-30) + gone).min(1)
        order[:, turn] = j
        scale = diagonal[experts, j].clamp_min(1e-30).rsqrt()[:, None]
        step = inverse[experts, j] * scale
        half = gram[experts, j] * scale - step * (cost / 2)[:, None]
        gone[experts, j] = torch.inf
        inverse.baddbmm_(step[:, :, None], step[:, None, :], alpha=-1)
        gram.baddbmm_(torch.stack([step, half], 2), torch.stack([half, step], 1), alpha=-1)
    rest = (gone == 0).nonzero()[:, 1].view(len(down), least)
    order[:, neurons - least :] = rest
    return order


def parameters_at(experts: Any, kept: Tensor, neurons: Tensor) -> dict[str, Tensor]:
    """Return the parameters of routed experts with those ``kept``, and the ``neurons (kept, width)`` of each."""
    parameters = {name: values.detach()[kept] for name, values in experts.named_parameters()}
    if neurons.shape[1] == width_of(experts):
        return parameters
    rows = torch.arange(len(kept), device=kept.device)[:, None]
    for name, values in parameters.items():
        if name == "down_proj_bias":
            continue
        down = name.startswith("down")
        columns, last = _places(experts, name, neurons), values.ndim == 2 or down != experts.is_transposed
        parameters[name] = values[rows, columns] if values.ndim == 2 or not last else values.mT[rows, columns].mT
    return parameters


def width_of(experts: Any) -> int:
    """Return the neurons of each of the routed experts."""
    down = experts.down_proj
    return int(down.shape[1 if experts.is_transposed else 2])


def _places(experts: Any, name: str, neurons: Tensor) -> Tensor:
    if not name.startswith("gate_up"):
        return neurons
    if experts.is_concatenated:
        return torch.cat([neurons, neurons + width_of(experts)], dim=1)
    return torch.stack([2 * neurons, 2 * neurons + 1], dim=2).flatten(1)
