"""Rounding a matrix to few bits, so that what it makes of its inputs changes least.

The error E of a rounded matrix costs ``tr(G E A E^T)``. Numbers are rounded one after the other, and what each one's
rounding costs is made up for by those that follow, first by those of its row (GPTQ, arXiv 2210.17323), then by those of
the rows behind it: with U^T U = A^-1, U upper triangular, the error e of column j takes ``e U[j, k] / U[j, j]`` from
every column k behind it, and likewise that of row i from every row behind it with the root of G^-1. That is Babai's
nearest plane for A and G at once, as in YAQA (arXiv 2505.22988).

A row needs of the rows before it only the columns that it has come to. So piece p of row i is rounded at step i + p, in
all blocks of ``ROWS`` rows at once. A piece is the columns that are rounded at a time, all of one group; the scale of a
group is fitted as its first piece is reached. G counts within a block, and blocks do not hear of each other. Without G
a block is one row; its scales and numbers are then improved in turn where the format can (``Levels.improved``). A block
that loses less where each number is rounded by itself, as one of equal numbers may, is rounded so.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gac.schemes.feedback.levels import Levels
from gac.schemes.feedback.order import Order, ahead_of, firm, root_of
from gac.schemes.feedback.sweep import sweep
from gac.schemes.inputs import Inputs

ROWS = 64
"""Rows that make up for one another's errors."""


def rounded(
    matrix: Tensor, inputs: Inputs, levels: Levels, size: int, gradients: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers ``(rows, columns)`` of a float64 matrix, and scales and zero points ``(rows, groups)``, all float64.

    Args:
        size: columns of a group.
        gradients: G, shape ``(rows, rows)``; None: the identity.
    """
    rows, high = len(matrix), 1 if gradients is None else min(ROWS, len(matrix))
    order = inputs.once((Order, size), lambda moment: Order.of(moment, size))
    columns = order.layout.columns(matrix)
    targets = _in_blocks(order.layout.in_pieces(columns), high)
    behind = matrix.new_zeros(rows, 1, 1) if gradients is None else _behind(firm(gradients), high)
    work = _Work(order, behind, targets, levels)
    for step in range(high + targets.shape[2] - 1):
        work.step(step)
    numbers, scale, zeros = (_in_rows(one)[:rows] for one in (work.numbers, work.scale, work.zeros))
    numbers, scale, zeros = (order.layout.in_groups(one) for one in (numbers, scale, zeros))
    scale, zeros = scale[..., :1], zeros[..., :1]
    if high == 1 and inputs.thorough:
        own = [one.transpose(0, 1).contiguous() for one in (columns, numbers, scale, zeros)]
        numbers, scale = (one.transpose(0, 1) for one in levels.improved(order, *own))
    found = numbers, scale, zeros
    if inputs.thorough:
        found = _better(levels, found, columns, order.layout.square(inputs.moment.double()), gradients, high)
    numbers, scale, zeros = found
    return order.layout.back(numbers), scale[..., 0], zeros[..., 0]


Groups = tuple[Tensor, Tensor, Tensor]
"""Numbers ``(rows, groups, size)``, scales and zero points ``(rows, groups, 1)``."""


def _better(
    levels: Levels, fed_back: Groups, columns: Tensor, moment: Tensor, gradients: Tensor | None, high: int
) -> Groups:
    """Of each block of rows what loses less: rounded with feedback, or every number by itself.

    Args:
        columns: the matrix, ``(rows, groups, size)``.
        moment: A in the order of the columns.
    """
    scale, zeros = levels.fitted(columns, columns.new_ones(columns.shape[-1]))
    alone = levels.nearest_(columns / scale + zeros), scale, zeros
    losses = [
        _losses(((numbers - zeros) * scale - columns).flatten(1), moment, gradients, high)
        for numbers, scale, zeros in (fed_back, alone)
    ]
    is_worse = (losses[0] > losses[1]).repeat_interleave(high)[: len(columns), None, None]
    numbers, scale, zeros = (torch.where(is_worse, *pair) for pair in zip(alone, fed_back, strict=True))
    return numbers, scale, zeros


def _losses(errors: Tensor, moment: Tensor, gradients: Tensor | None, high: int) -> Tensor:
    """``tr(G E A E^T)`` of each block of rows."""
    seen = errors @ moment
    if gradients is None:
        return (seen * errors).sum(1)
    parts = zip(torch.split(seen, high), torch.split(errors, high), range(0, len(errors), high), strict=True)
    return torch.stack(
        [((own @ error.T) * gradients[start : start + high, start : start + high]).sum() for own, error, start in parts]
    )


def _in_blocks(values: Tensor, high: int) -> Tensor:
    """Rows in blocks: from ``(rows, pieces, width)`` to ``(high, blocks, pieces, width)``; zeros fill the last one."""
    rows, pieces, width = values.shape
    return pad(values, (0, 0, 0, 0, 0, -rows % high)).view(-1, high, pieces, width).transpose(0, 1).contiguous()


def _in_rows(values: Tensor) -> Tensor:
    """From ``(high, blocks, pieces, width)`` to ``(rows, pieces, width)``."""
    return values.transpose(0, 1).flatten(0, 1)


def _behind(moment: Tensor, high: int) -> Tensor:
    """What the error of a row takes from those behind it, by block: ``(blocks, high, high)``."""
    found = moment.new_zeros(-(-len(moment) // high), high, high)
    for own, start in zip(found, range(0, len(moment), high), strict=True):
        root = root_of(moment[start : start + high, start : start + high])
        own[: len(root), : len(root)] = ahead_of(root)
    return found


class _Work:
    """A matrix being rounded, in blocks of rows.

    Args:
        behind: what rows take from those behind them, ``(blocks, high, high)``.
        targets: the matrix, ``(high, blocks, pieces, width)``; errors of rows change those behind them.
    """

    def __init__(self, order: Order, behind: Tensor, targets: Tensor, levels: Levels) -> None:
        self._order, self._behind, self._targets, self._levels = order, behind, targets, levels
        self._made_up = torch.zeros_like(targets)
        self.numbers = torch.zeros_like(targets)
        self.scale, self.zeros = (torch.ones_like(targets[..., :1]) for _ in range(2))

    def step(self, step: int) -> None:
        """Round piece p of row ``step - p`` of every block, for all p that have such a row."""
        high, _, count, width = self._targets.shape
        first, end = max(0, step - high + 1), min(step + 1, count)
        self._fit(step, first, end)
        pieces = torch.arange(end - 1, first - 1, -1, device=self._targets.device)
        rows = step - pieces
        at = rows, slice(None), pieces
        scale, zeros = self.scale[at], self.zeros[at]
        units = (self._targets[at] - self._made_up[at]) / scale + zeros
        columns = pieces[:, None] * width + torch.arange(width, device=pieces.device)
        ahead = self._order.ahead[columns]
        self.numbers[at], errors = sweep(units, _own(ahead, columns), self._levels)
        behind = slice(first * width, None)  # errors take nothing from the columns before them
        made_up = self._made_up[step - end + 1 : step - first + 1].flatten(2)[..., behind]
        made_up.baddbmm_(errors * scale, ahead[..., behind])
        if high > 1:
            missed = self._targets[at] - (self.numbers[at] - zeros) * scale
            self._targets[:, :, pieces] -= torch.einsum("bka,kbp->abkp", self._behind[:, rows], missed)

    def _fit(self, step: int, first: int, end: int) -> None:
        """Fit scales and zero points of the groups that begin with one of these pieces."""
        each = self._order.layout.pieces
        groups = torch.arange(-(-first // each), -(-end // each), device=self._targets.device)
        if not len(groups):
            return
        rows, starts = (step - groups * each)[:, None], (groups * each)[:, None]
        at = rows, slice(None), starts + torch.arange(each, device=groups.device)
        values = (self._targets[at] - self._made_up[at]).transpose(1, 2).flatten(2)
        scale, zeros = self._levels.fitted(values, self._order.weighs[groups])
        self.scale[at], self.zeros[at] = scale[:, None], zeros[:, None]


def _own(ahead: Tensor, columns: Tensor) -> Tensor:
    """Of rows ``(pairs, width, all)`` of a square matrix, the columns of the same numbers."""
    return ahead.gather(2, columns[:, None].expand(-1, columns.shape[1], -1))
