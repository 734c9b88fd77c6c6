"""A few columns rounded one after the other, each for the errors of those before it."""

import torch
from torch import Tensor

from gac.core.linalg import single_thread
from gac.schemes.feedback.levels import Levels


def sweep(units: Tensor, takes: Tensor, levels: Levels, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Numbers, and what each was before less what it is, both ``(pairs, rows, width)``.

    On a GPU one kernel does it (``gac.schemes.feedback.sweep_kernel``): to launch every column would take most of the
    time.

    Args:
        units: what the numbers should be, float64, ``(pairs, rows, width)``.
        takes: by what an error of column j lowers column k, ``(pairs, width, width)``; used where k > j.
        levels: the numbers that there are.
        before: what they were; None: what they should be, by the time their column comes.
    """
    if units.is_cuda:
        from gac.schemes.feedback.sweep_kernel import launch

        return launch(units, takes, levels.most, levels.floating, before)
    if not takes.triu(1).any():  # of inputs that are not correlated
        numbers = levels.nearest_(units.clone())
        return numbers, (units if before is None else before) - numbers
    work = units.permute(2, 0, 1).contiguous()
    was = work if before is None else before.permute(2, 0, 1)
    takes = takes.permute(1, 2, 0)[..., None]
    numbers, errors = torch.empty_like(work), torch.empty_like(work)
    with single_thread():
        for at in range(len(work)):
            levels.nearest_(numbers[at].copy_(work[at]))
            torch.sub(was[at], numbers[at], out=errors[at])
            work[at + 1 :].addcmul_(takes[at, at + 1 :], errors[at], value=-1)
    return numbers.permute(1, 2, 0), errors.permute(1, 2, 0)
