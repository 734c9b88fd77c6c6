"""Value vectors and o_proj at every length at once, see ``gac.forms.head_dim.torch``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.forms.curvature.metric import Metric
from gac.forms.loss_curves import LossCurve
from gac.forms.narrow.elimination import compensated


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
        kept = (torch.arange(heads)[:, None] * head_dim + torch.arange(length)).flatten().to(self.output.device)
        return compensated(self.output.flatten(1), kept, Metric(self.inputs, metric.gradients))
