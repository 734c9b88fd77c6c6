"""One weight fitted again to the model as it is compressed so far; ``gac.compression.refit`` takes the statistics.

With S = E[x' x'^T] of the inputs x' in the compressed model, x those in the dense model, every token counting as it
does in the moments, and D a damping that grows where there are few tokens for an input feature:

- a weight inside a layer is fitted half a step towards its dense outputs W x: ``W T`` with
  ``T = I + 1/2 (E[x x'^T] - S) (S + D)^-1``;
- a weight that writes to the residual stream (o_proj, down_proj) is fitted to its dense output and to what the residual
  stream has lost so far: ``W + (E[t x'^T] - W S) (S + D)^-1``, t being both together. Where a norm or a factor comes
  before the stream, what it has lost is divided by that (``gac.compression.paired_run``).

Dense targets on compressed inputs are GPTAQ's (arXiv 2504.02692), there for quantisation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gac.core.linalg import cholesky, damped
from gac.forms.artifacts import LayerArtifacts
from gac.forms.base import Form
from gac.forms.curvature.methods import Method
from gac.forms.curvature.metric import Halves, Moments
from gac.models.linears import as_linear
from gac.models.sites import Weight

MEAN_DAMPING, OWN_DAMPING = 3e-2, 1e-1
"""Damping of the regressions, see ``gac.core.linalg.damped``."""
TOKENS = 128
"""Tokens for each input feature from which that damping is enough; with fewer it grows as they get fewer."""
STEP = 0.5
"""Step of a weight inside a layer towards its dense outputs."""


@dataclass(frozen=True, eq=False)
class CompressedMeans:
    """Means over the tokens from which a weight is fitted, float64.

    Attributes:
        halves: S = E[x' x'^T] of its inputs x' in the compressed model, on two halves of the windows.
        cross: E[m x'^T]: m is the dense input less x' for a weight inside a layer, shape ``(in, in)``; for one that
            writes to the residual stream, its dense output without the bias, corrected for what the stream has lost,
            shape ``(out, in)``.
        scale: E[|x'|], shape ``(in,)``.
        target: E[m], shape ``(in,)`` or ``(out,)``.
        tokens: their number.
    """

    halves: Halves
    cross: Tensor
    scale: Tensor
    target: Tensor
    tokens: int

    @cached_property
    def square(self) -> Tensor:
        """S over all windows."""
        return self.halves.mean().double()

    def moments(self, method: Method, gradients: Tensor) -> Moments:
        """With S in place of the dense model's moment of the inputs."""
        return Moments(method.pooled(self.halves), gradients, self.scale.float())

    def solved(self, missing: Tensor) -> Tensor:
        """Times (S + D)^-1."""
        more = max(1.0, TOKENS * len(self.square) / self.tokens)
        return torch.cholesky_solve(missing.T, cholesky(damped(self.square, more * MEAN_DAMPING, more * OWN_DAMPING))).T


@dataclass(frozen=True, eq=False)
class WeightRefit:
    """One weight being fitted.

    Attributes:
        form, dim: what the weight was compressed to.
        dense: W of the dense model, shape ``(out, in)``.
        bias: of the dense model, shape ``(out,)``, where there is one.
        artifacts: of the weight's layer.
        method: the method that measures errors.
    """

    weight: Weight
    form: Form
    dim: int
    dense: Tensor
    bias: Tensor | None
    artifacts: LayerArtifacts
    means: CompressedMeans
    method: Method

    @cached_property
    def turn(self) -> Tensor:
        """T of a weight inside a layer, shape ``(in, in)``."""
        eye = torch.eye(len(self.means.square), dtype=torch.float64, device=self.means.square.device)
        return eye + STEP * self.means.solved(self.means.cross)

    def matrix(self, before: Tensor) -> Tensor:
        """A matrix ``(out, in)`` with inputs x', fitted again, float64."""
        before = before.detach().double()
        if not self.weight.to_residual:
            return before @ self.turn
        return before + self.means.solved(self.means.cross - before @ self.means.square)


Refits = Mapping[str, Callable[[WeightRefit, nn.Module], None]]


def refit_matrix(refit: WeightRefit, module: nn.Module) -> None:
    weight = as_linear(module).weight
    assert isinstance(weight, Tensor)
    weight.copy_(refit.matrix(weight))
