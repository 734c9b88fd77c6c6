"""The values of a number format, how its scales are fitted, and how a few columns are quantised one after the other."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gac.core.linalg import single_thread

if TYPE_CHECKING:
    from gac.schemes.feedback.order import Order


class Levels(ABC):
    """Values of a number with scale 1.

    Attributes:
        most: the largest.
        number: ``e4m3`` or ``e2m1``, floating point of 8 or 4 bits from ``-most`` on; ``integer`` from 0 on.
    """

    most: int
    number: ClassVar[str] = "integer"

    @property
    def floating(self) -> bool:
        return self.number != "integer"

    @property
    def least(self) -> int:
        return -self.most if self.floating else 0

    @abstractmethod
    def nearest_(self, units: Tensor) -> Tensor:
        """Round float64 numbers to the nearest values, in place."""

    @abstractmethod
    def rounded(self, values: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        """Numbers of the nearest values to ``(..., rows, columns)``, with scales and zero points from ``fitted``."""

    @abstractmethod
    def fitted(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and zero points of least error for values ``(..., rows, columns)``, both ``(..., rows, 1)``, float64.

        ``weights`` are of squared errors, by column, shape ``(..., columns)``.
        """

    def improved(
        self, order: "Order", targets: Tensor, numbers: Tensor, scale: Tensor, zeros: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Numbers and scales with a smaller error of the product with the inputs; by default as they are.

        ``targets`` are the matrix, ``(groups, rows, size)``, as are ``numbers``; ``scale`` and ``zeros`` have size 1.
        """
        return numbers, scale


def fitted_to_blocks(levels: Levels, values: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """``Levels.fitted`` of groups ``(rows, groups, size)`` whose errors count alike, both ``(rows, groups, 1)``.

    ``height`` rows have one scale; the last rows may be fewer.
    """
    rows, groups, size = values.shape
    padded = pad(values, (0, 0, 0, 0, 0, -rows % height))
    blocks = padded.view(-(-rows // height), height, groups, size).transpose(1, 2).flatten(2)
    scale, zeros = levels.fitted(blocks, blocks.new_ones(height * size))
    return scale.repeat_interleave(height, 0)[:rows], zeros.repeat_interleave(height, 0)[:rows]


def sweep(units: Tensor, factors: Tensor, levels: Levels, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Numbers, and their errors (before less after), both ``(pairs, rows, width)``.

    On a GPU one kernel does it (``gac.schemes.feedback.sweep_kernel``): launches per column would take the time.

    Args:
        units: exact numbers, float64, ``(pairs, rows, width)``.
        factors: share of the error of column j that lowers column k, ``(pairs, width, width)``; used where k > j.
        levels: values of a number.
        before: earlier numbers, from which errors count; None: the exact ones by the time their column comes.
    """
    if units.is_cuda:
        from gac.schemes.feedback.sweep_kernel import launch

        return launch(units, factors, levels.most, levels.number, before)
    if not factors.triu(1).any():  # uncorrelated inputs
        numbers = levels.nearest_(units.clone())
        return numbers, (units if before is None else before) - numbers
    work = units.permute(2, 0, 1).contiguous()
    numbers, errors = torch.empty_like(work), torch.empty_like(work)
    exact = (work if before is None else before.permute(2, 0, 1)).unbind()
    columns = zip(exact, work.unbind(), numbers.unbind(), errors.unbind(), factors[..., None].unbind(1), strict=True)
    with single_thread():
        for column, (was, now, number, error, share) in enumerate(columns, 1):
            torch.sub(was, levels.nearest_(number.copy_(now)), out=error)
            work[column:].addcmul_(share.transpose(0, 1)[column:], error, value=-1)
    return numbers.permute(1, 2, 0), errors.permute(1, 2, 0)
