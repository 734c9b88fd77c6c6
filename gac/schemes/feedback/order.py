"""The order in which the columns of a matrix are rounded, and what the error of each takes from those behind it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gac.core.linalg import cholesky, damped, identity_like
from gac.schemes.feedback.layout import Layout

DAMPING = 1e-2
"""Of A and of G, see ``gac.core.linalg.damped``."""


@dataclass(frozen=True, eq=False)
class Order:
    """The columns in the order in which they are rounded, and what follows from A for it.

    Attributes:
        moment: A, damped, in this order, shape ``(size, size)``.
        ahead: what the error of a column takes from those behind it, ``U[j, k] / U[j, j]``, shape ``(size, size)``.
        weighs: what is left of a squared error of each column once those behind it have made up for it, by group.
    """

    layout: Layout
    moment: Tensor
    ahead: Tensor
    weighs: Tensor

    @staticmethod
    def of(moment: Tensor, size: int) -> "Order":
        """Of A, shape ``(columns, columns)``, in groups of so many columns."""
        layout = Layout.of(moment, size)
        square = layout.square(firm(moment))
        root = root_of(square)
        return Order(layout, square, ahead_of(root), (root.diagonal() ** -2).view(layout.at.shape))


def firm(moment: Tensor) -> Tensor:
    """A or G, float64, with ``DAMPING``."""
    return damped(moment, DAMPING)


def root_of(moment: Tensor) -> Tensor:
    """U, upper triangular, with U^T U the inverse of a moment ``(size, size)``.

    With R R^T the moment and R upper triangular, U is the inverse of R.
    """
    upper = cholesky(moment.flip(0, 1)).flip(0, 1)
    root: Tensor = torch.linalg.solve_triangular(upper, identity_like(upper), upper=True)
    return root


def ahead_of(root: Tensor) -> Tensor:
    """What an error takes from those behind it: U, its rows over its diagonal, above it."""
    return (root / root.diagonal()[:, None]).triu(1)
