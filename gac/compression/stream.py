"""Map a correction of the residual stream back to the output of a weight."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gac.models.families import family_of
from gac.models.sites import Weight

RIDGE = 1e-2
"""Gains of a norm below the root of this times their mean square ask for no more of the weight than larger ones."""
_TINY = torch.finfo(torch.float32).tiny


class ToStream:
    """The way of outputs y ``(..., out)`` of a weight into the residual stream: times a number, mostly 1."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def added(self, outputs: Tensor) -> Tensor:
        """Contribution to the stream."""
        return outputs if self._factor == 1 else outputs * self._factor

    def step(self, outputs: Tensor, more: Tensor) -> Tensor:
        """Return the change of the outputs that adds ``more`` to the stream, float32; both ``(tokens, out)``."""
        return more if self._factor == 1 else more / self._factor


class Norm(ToStream):
    """Outputs pass an RMS norm: a(y) = s g y with gains g, and s = 1 / rms(y), which follows from what it returns.

    A step is divided by s and g, as if s stayed as it is. What it has along y, the norm undoes; leaving that out, or
    counting tokens by s, changes nothing that could be measured (results/refit.md).
    """

    def __init__(self, norm: nn.Module) -> None:
        self._norm = norm
        with torch.no_grad():
            self._gains: Tensor = norm(torch.ones_like(next(norm.parameters()))).float()

    def added(self, outputs: Tensor) -> Tensor:
        normed: Tensor = self._norm(outputs)
        return normed

    def step(self, outputs: Tensor, more: Tensor) -> Tensor:
        gains = self._gains
        scaled = gains * outputs.float()
        slope = (self.added(outputs).float() * scaled).sum(1) / scaled.square().sum(1).clamp_min(_TINY)
        step = more * (gains / (gains.square() + RIDGE * gains.square().mean())) / slope[:, None]
        return step.where(slope[:, None] > 0, 0.0)  # outputs that are all zero have no direction to keep


def ways_of(model: nn.Module, weights: Sequence[Weight]) -> dict[str, ToStream]:
    """The ways of those weights that write to the residual stream, by name."""
    family = family_of(model.config)
    ways: dict[str, ToStream] = {}
    for weight in (weight for weight in weights if weight.to_residual):
        path = family.residual_path(model.config, weight.name)
        ways[weight.name] = ToStream(path.factor) if path.norm is None else Norm(model.get_submodule(path.norm))
    return ways
