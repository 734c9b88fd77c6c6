"""Metrics of errors of weights.

Replacing W by W - E costs about ``1/2 tr(G E A E^T)`` nats a token (K-FAC, arXiv 1503.05671), with A the second moment
of the weight's inputs and G that of the gradients at its output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gac.core.linalg import add_square, eigh, mirrored, tf32_products

# Between the curvature's sum and the measured loss: theory says 1/2 for small errors; fitted once on
# SmolLM2-135M at kept 0.9 to 0.6 (tests/benchmarks/quality.py prints the fit).
FACTOR = 0.64


@dataclass(frozen=True, eq=False)
class Metric:
    """The metric of errors of a weight, float64: ``inputs`` ``(in, in)`` and ``gradients`` ``(out, out)``."""

    inputs: Tensor
    gradients: Tensor

    def cost(self, error: Tensor) -> Tensor:
        """``tr(G E A E^T)`` of an error ``(out, in)``, shape ``()``, float64.

        A GPU multiplies in TF32, which was at most 0.001 of the cost off where A spans six orders of magnitude.
        """
        kind = torch.float32 if error.is_cuda else torch.float64
        with tf32_products(error.is_cuda):
            products = self.gradients.to(kind) @ error.to(kind) @ self.inputs.to(kind)
        cost: Tensor = (products.double() * error).sum()
        return cost


@dataclass(frozen=True, eq=False)
class MeasuredWeight:
    """A weight ``(out, in)`` and its metric."""

    weight: Tensor
    metric: Metric


@dataclass(frozen=True, eq=False)
class Halves:
    """A second moment as either half of the text shows it, float32.

    Attributes:
        first, second: shape ``(size, size)``; there is no second where the text has one window.
        share: how much of the text the first counts for, from 0 to 1.
    """

    first: Tensor
    second: Tensor | None
    share: float

    def mean(self) -> Tensor:
        return self.first if self.second is None else torch.lerp(self.second, self.first, self.share)

    def cross_fitted(self) -> Tensor:
        """The moment along the directions of one half as the other half shows it, the mean of both ways, float32.

        Of a moment from little text the largest eigenvalues are too large and the smallest too small, for the same
        text chose their directions. On text that did not choose them they are neither (NERCOME with one split, C. Lam,
        Annals of Statistics 44(3), 2016). So what is priced in the result is priced on text that did not choose.
        """
        assert self.second is not None, "one window has no halves"
        total = torch.zeros_like(self.first)
        for chosen, other in ((self.first, self.second), (self.second, self.first)):
            _, vectors = eigh(chosen)
            shown = (vectors * (other @ vectors)).sum(0).clamp_min_(0)
            add_square(total, (vectors * (shown / 2).sqrt()).T)
        return mirrored(total)


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """A sample of the tokens that a router and its experts read.

    Attributes:
        inputs: shape ``(tokens, hidden)``, in the model's dtype.
        counts: the weight of each token, 1 on average over the text, shape ``(tokens,)``, float32.
        gradients: second moment of the gradients at what the experts write, shape ``(hidden, hidden)``, float32.
    """

    inputs: Tensor
    counts: Tensor
    gradients: Tensor

    def thinned(self, most: int) -> "RoutedTokens":
        """Return at most so many of the tokens, evenly spaced."""
        chosen = slice(None, None, -(-len(self.inputs) // most))
        return RoutedTokens(self.inputs[chosen], self.counts[chosen], self.gradients)

    def to(self, device: torch.device) -> "RoutedTokens":
        return RoutedTokens(self.inputs.to(device), self.counts.to(device), self.gradients.to(device))


@dataclass(frozen=True, eq=False)
class Moments:
    """Second moments of one weight's inputs and output gradients, float32.

    Attributes:
        inputs: second moment A of the activations, shape ``(in, in)``.
        gradients: second moment G of the gradients at the output, shape ``(out, out)``.
        scale: mean absolute activation of each input feature (weighed as A is), shape ``(in,)``.
        noise: mean squared error (likewise) of each input feature where inputs are quantised token by token, shape
            ``(in,)``, by the name of the quantiser (``gac.runtime.storage.eight_bits``); empty without tokens.
    """

    inputs: Tensor
    gradients: Tensor
    scale: Tensor
    noise: Mapping[str, Tensor] = field(default_factory=dict)
