"""What an error of a weight is measured in.

Replacing W by W - E costs about ``1/2 tr(G E A E^T)`` nats a token (K-FAC, arXiv 1503.05671), with A the second moment
of the weight's inputs and G that of the gradients at its output.
"""

from dataclasses import dataclass

from torch import Tensor

# Between the curvature's sum and the measured loss: theory says 1/2 for small errors; fitted once on
# SmolLM2-135M at kept 0.9 to 0.6 (tests/benchmarks/quality.py prints the fit).
FACTOR = 0.64


@dataclass(frozen=True, eq=False)
class Metric:
    """What an error of a weight is measured in, float64: ``inputs`` ``(in, in)`` and ``gradients`` ``(out, out)``."""

    inputs: Tensor
    gradients: Tensor


@dataclass(frozen=True, eq=False)
class Measured:
    """A weight ``(out, in)`` and its metric."""

    weight: Tensor
    metric: Metric


@dataclass(frozen=True, eq=False)
class Moments:
    """What was seen of one weight, float32.

    Attributes:
        inputs: second moment A of the activations, shape ``(in, in)``.
        gradients: second moment G of the gradients at the output, shape ``(out, out)``.
        scale: mean absolute activation of each input feature (weighed as A is), shape ``(in,)``.
    """

    inputs: Tensor
    gradients: Tensor
    scale: Tensor
