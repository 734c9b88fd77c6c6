"""Methods: metrics of a weight's error. They differ in A and G, see ``gac.forms.curvature.metric``."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from gac.core.linalg import damped, identity_like
from gac.forms.curvature.metric import Halves, MeasuredWeight, Metric, Moments

if TYPE_CHECKING:
    from gac.forms.head_dim.torch import ShortenedValues

LARGEST_CROSS_FITTED = 8192
"""Moments of more features are not cross-fitted: their eigenvectors would take most of the calibration's time."""
DAMPING = 1e-3
"""Mean damping of cross-fitted moments, see ``gac.core.linalg.damped``."""
UNCROSSED = 1e-2, 3e-2
"""Mean and own damping of the others."""


class Method(ABC):
    """A metric for errors of weights; ``gac.testing.check_method`` checks one of your own.

    Results are kept on disk under the method's name: a method that measures differently needs another name.

    Attributes:
        name: as users give it, with its parameter where it has one.
        power: p of the statistics, see ``gac.measurement.calibration``.
        forms: the forms that it is for; empty: any but those of other methods.
        folds: v_proj is truncated by itself for the form ``head_dim``, by ``fold``.
        refits: its plans are refitted by default.
        two_sided: errors of outputs are weighted by the gradients of each output, not by their mean.
    """

    name: str
    power: ClassVar[float] = 0.0
    forms: tuple[str, ...] = ()
    folds: ClassVar[bool] = False
    refits: ClassVar[bool] = False
    two_sided: ClassVar[bool] = False

    def pooled(self, halves: Halves) -> Tensor:
        """A second moment, from those of two halves of the text."""
        return halves.mean()

    @abstractmethod
    def inputs(self, moments: Moments) -> Tensor:
        """The metric of the inputs' side of an error, float64 ``(in, in)``."""

    def gradients(self, moments: Moments) -> Tensor:
        """The outputs' side, float64 ``(out, out)``: the mean squared gradient, the same for all outputs."""
        return identity_like(moments.gradients) * moments.gradients.diagonal().double().mean()

    def metric(self, moments: Moments) -> Metric:
        return Metric(self.inputs(moments), self.gradients(moments))

    def fold(self, values: MeasuredWeight, output: Tensor, heads: int, groups: int) -> "ShortenedValues":
        """Value vectors at every length, from v_proj alone; for methods with ``folds``.

        ``output`` is o_proj's weight, shape ``(out, heads * head_dim)``; ``groups`` counts the key-value heads.
        """
        raise NotImplementedError


class Kfac(Method):
    """Two-sided curvature: both partial traces of the Fisher matrix (K-FAC, arXiv 1503.05671, takes its factors apart).

    Its moments are cross-fitted between two halves of the text. results/curvature.md has the alternatives.
    """

    name = "kfac"
    power = 2.0
    refits = True
    two_sided = True

    def pooled(self, halves: Halves) -> Tensor:
        if halves.second is None or len(halves.first) > LARGEST_CROSS_FITTED:
            return damped(halves.mean(), *UNCROSSED).float()
        return halves.cross_fitted()

    def inputs(self, moments: Moments) -> Tensor:
        return damped(moments.inputs, DAMPING)

    def gradients(self, moments: Moments) -> Tensor:
        return damped(moments.gradients, DAMPING)
