"""A method: the error of an output counts as much as its gradients are large (FWSVD, arXiv 2207.00112).

FWSVD weighs the rows of a weight by the sum of their Fisher information. With the statistics of GAC that sum is the
mean squared gradient of the output, times what is the same for all rows.
"""

import torch
from torch import Tensor

from gac.forms.curvature.methods import Method, identity_like
from gac.forms.curvature.metric import Moments


class Fwsvd(Method):
    """Rows weighed by their Fisher information; inputs all alike."""

    name = "fwsvd"
    two_sided = True

    def inputs(self, moments: Moments) -> Tensor:
        return identity_like(moments.inputs) * _raised(moments.inputs.diagonal().double()).mean()

    def gradients(self, moments: Moments) -> Tensor:
        return torch.diag(_raised(moments.gradients.diagonal().double()))


def _raised(squares: Tensor) -> Tensor:
    """Those that are next to nothing raised to a millionth of the mean, so that no error counts nothing at all."""
    mean = squares.mean()
    return squares.clamp_min(1e-6 * mean) if mean > 0 else torch.ones_like(squares)
