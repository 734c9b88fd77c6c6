"""A few columns quantised one after the other, each with the errors of those before it."""

import torch
from torch import Tensor

from gac.core.linalg import single_thread
from gac.schemes.feedback.levels import Levels


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

        return launch(units, factors, levels.most, levels.floating, before)
    if not factors.triu(1).any():  # uncorrelated inputs
        numbers = levels.nearest_(units.clone())
        return numbers, (units if before is None else before) - numbers
    work = units.permute(2, 0, 1).contiguous()
    was = work if before is None else before.permute(2, 0, 1)
    factors = factors.permute(1, 2, 0)[..., None]
    numbers, errors = torch.empty_like(work), torch.empty_like(work)
    with single_thread():
        for column in range(len(work)):
            levels.nearest_(numbers[column].copy_(work[column]))
            torch.sub(was[column], numbers[column], out=errors[column])
            work[column + 1 :].addcmul_(factors[column, column + 1 :], errors[column], value=-1)
    return numbers.permute(1, 2, 0), errors.permute(1, 2, 0)
