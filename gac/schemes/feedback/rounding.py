"""Rounding a matrix to few bits, so that what it makes of its inputs changes least.

The error E of a rounded matrix costs ``tr(G E A E^T)``. Numbers are rounded one after the other, and what each one's
rounding costs is made up for by those that follow, first by those of its row (GPTQ, arXiv 2210.17323), then by those of
the rows behind it: with U^T U = A^-1, U upper triangular, the error e of column j takes ``e U[j, k] / U[j, j]`` from
every column k behind it, and likewise that of row i from every row behind it with the root of G^-1. That is Babai's
nearest plane for A and G at once, as in YAQA (arXiv 2505.22988).

A row needs of the rows before it only the columns that it has come to. So group g of row i is rounded at step i + g,
in all blocks of ``ROWS`` rows at once: G counts within a block, and blocks do not hear of each other. Without G a block
is one row; its scales and numbers are then improved in turn where the format can (``Levels.improved``).
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
    targets = _in_blocks(order.layout.columns(matrix), high)
    behind = matrix.new_zeros(rows, 1, 1) if gradients is None else _behind(firm(gradients), high)
    work = _Work(order, behind, targets, levels)
    for step in range(high + len(order.layout.at) - 1):
        work.step(step)
    numbers, scale, zeros = work.numbers, work.scale, work.zeros
    if high == 1 and inputs.thorough:
        numbers[0], scale[0] = levels.improved(order, targets[0], numbers[0], scale[0], zeros[0])
    numbers, scale, zeros = (_in_rows(one)[:rows] for one in (numbers, scale, zeros))
    return order.layout.back(numbers), scale[..., 0], zeros[..., 0]


def _in_blocks(values: Tensor, high: int) -> Tensor:
    """Rows in blocks: from ``(rows, groups, size)`` to ``(high, groups, blocks, size)``; zeros fill the last one."""
    rows, groups, size = values.shape
    return pad(values, (0, 0, 0, 0, 0, -rows % high)).view(-1, high, groups, size).permute(1, 2, 0, 3).contiguous()


def _in_rows(values: Tensor) -> Tensor:
    """From ``(high, groups, blocks, size)`` to ``(rows, groups, size)``."""
    return values.permute(2, 0, 1, 3).flatten(0, 1)


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
        targets: the matrix, ``(high, groups, blocks, size)``; errors of rows change those behind them.
    """

    def __init__(self, order: Order, behind: Tensor, targets: Tensor, levels: Levels) -> None:
        self._order, self._behind, self._targets, self._levels = order, behind, targets, levels
        self._made_up = torch.zeros_like(targets)
        self.numbers = torch.zeros_like(targets)
        self.scale, self.zeros = (torch.ones_like(targets[..., :1]) for _ in range(2))

    def step(self, step: int) -> None:
        """Round group g of row ``step - g`` of every block, for all g that have such a row."""
        high, count = self._targets.shape[:2]
        groups = torch.arange(max(0, step - high + 1), min(step + 1, count), device=self._targets.device)
        rows = step - groups
        at = rows, groups
        scale, zeros = self._levels.fitted(self._targets[at] - self._made_up[at], self._order.weighs[groups])
        self.scale[at], self.zeros[at] = scale, zeros
        for part, columns in self._order.layout.parts(groups):
            units = (self._targets[at] - self._made_up[at])[..., part] / scale + zeros
            ahead = self._order.ahead[columns]
            numbers, errors = sweep(units, _own(ahead, columns), self._levels)
            self.numbers[(*at, slice(None), part)] = numbers
            taken = ((errors * scale) @ ahead).view(*errors.shape[:2], *self._order.layout.at.shape)
            self._made_up[rows] += taken.transpose(1, 2)
        if high > 1:
            missed = self._targets[at] - (self.numbers[at] - zeros) * scale
            self._targets[:, groups] -= torch.einsum("bka,kbp->akbp", self._behind[:, rows], missed)


def _own(ahead: Tensor, columns: Tensor) -> Tensor:
    """Of rows ``(pairs, width, all)`` of a square matrix, the columns of the same numbers."""
    return ahead.gather(2, columns[:, None].expand(-1, columns.shape[1], -1))
