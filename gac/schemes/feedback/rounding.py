"""Quantising a matrix with error feedback, so that its product with the inputs changes least.

The error E of a quantised matrix costs ``tr(G E A E^T)``. Numbers are quantised one after the other, and the error of
each is compensated by later ones, first in its row (GPTQ, arXiv 2210.17323), then in later rows: with U^T U = A^-1, U
upper triangular, the error e of column j takes ``e U[j, k] / U[j, j]`` from every later column k, and likewise that of
row i from every later row with the root of G^-1. That is Babai's nearest plane for A and G at once, as in YAQA (arXiv
2505.22988).

A row needs of earlier rows only the columns up to its own. So piece p of row i is quantised at step i + p, in all
blocks of ``ROWS`` rows at once. A piece is the columns that are quantised at a time, all of one group; the scale of a
group is fitted with its first piece. G counts within a block, and blocks are independent. Without G a block is one row;
its scales and numbers are then improved in turn where the format can (``Levels.improved``). A block that loses less
without feedback, as one of equal numbers may, is quantised number by number. Scales that rows share are fitted to the
matrix before all else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gac.schemes.feedback.levels import Levels, fitted_to_blocks, sweep
from gac.schemes.feedback.order import Inputs, Order, ahead_of, firm, root_of

ROWS = 64
"""Rows that compensate one another's errors."""


def quantise(
    matrix: Tensor, inputs: Inputs, levels: Levels, size: int, gradients: Tensor | None = None, shared: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers ``(rows, columns)`` of a float64 matrix, and scales and zero points ``(rows, groups)``, all float64.

    A group has ``size`` columns, and its scale ``shared`` rows; ``gradients`` are G, shape ``(rows, rows)``; None: the
    identity.
    """
    rows, height = len(matrix), 1 if gradients is None else min(ROWS, len(matrix))
    order = inputs.once((Order, size), lambda moment: Order.of(moment, size))
    columns = order.layout.grouped(matrix)
    pieces = columns.reshape(rows, -1, order.layout.width)
    behind = matrix.new_zeros(rows, 1, 1) if gradients is None else _behind(firm(gradients), height)
    fitted = None if shared == 1 else fitted_to_blocks(levels, columns, shared)
    each = pieces.shape[1] // columns.shape[1]
    by_piece = fitted and [_in_blocks(values.repeat_interleave(each, 1), height, fill=1.0) for values in fitted]
    work = _Work(order, behind, _in_blocks(pieces, height), levels, by_piece)
    for step in range(height + pieces.shape[1] - 1):
        work.step(step)
    numbers, scale, zeros = (
        blocks.transpose(0, 1).flatten(0, 1)[:rows].reshape(*columns.shape[:2], -1)
        for blocks in (work.numbers, work.scale, work.zeros)
    )
    scale, zeros = scale[..., :1], zeros[..., :1]
    if height == 1 and fitted is None and inputs.thorough:
        by_group = [values.transpose(0, 1).contiguous() for values in (columns, numbers, scale, zeros)]
        numbers, scale = (values.transpose(0, 1) for values in levels.improved(order, *by_group))
    if inputs.thorough:
        moment = order.layout.square(inputs.moment.double())
        fitted = fitted or fitted_to_blocks(levels, columns, 1)
        numbers, scale, zeros = _best(levels, (numbers, scale, zeros), fitted, columns, moment, gradients, height)
    return order.layout.ungrouped(numbers), scale[..., 0], zeros[..., 0]


Groups = tuple[Tensor, Tensor, Tensor]
"""Numbers ``(rows, groups, size)``, scales and zero points ``(rows, groups, 1)``."""


def _in_blocks(rows: Tensor, height: int, fill: float = 0.0) -> Tensor:
    """Rows ``(rows, pieces, n)`` in blocks, ``(height, blocks, pieces, n)``; the last one is filled up."""
    padded = pad(rows, (0, 0, 0, 0, 0, -len(rows) % height), value=fill)
    return padded.view(-1, height, *rows.shape[1:]).transpose(0, 1).contiguous()


def _best(
    levels: Levels,
    fed_back: Groups,
    fitted: tuple[Tensor, Tensor],
    columns: Tensor,
    moment: Tensor,
    gradients: Tensor | None,
    height: int,
) -> Groups:
    """The better of two for each block of rows: with feedback, or number by number.

    ``columns`` is the matrix, ``(rows, groups, size)``, to which scales and zero points are ``fitted``; ``moment`` is A
    in the order of the columns.
    """
    scale, zeros = fitted
    alone = levels.nearest_(columns / scale + zeros), scale, zeros
    losses = [
        _losses(((numbers - zeros) * scale - columns).flatten(1), moment, gradients, height)
        for numbers, scale, zeros in (fed_back, alone)
    ]
    is_worse = (losses[0] > losses[1]).repeat_interleave(height)[: len(columns), None, None]
    numbers, scale, zeros = (torch.where(is_worse, *pair) for pair in zip(alone, fed_back, strict=True))
    return numbers, scale, zeros


def _losses(errors: Tensor, moment: Tensor, gradients: Tensor | None, height: int) -> Tensor:
    """``tr(G E A E^T)`` of each block of rows."""
    products = errors @ moment
    if gradients is None:
        return (products * errors).sum(1)
    parts = zip(torch.split(products, height), torch.split(errors, height), range(0, len(errors), height), strict=True)
    return torch.stack(
        [
            ((product @ error.T) * gradients[start : start + height, start : start + height]).sum()
            for product, error, start in parts
        ]
    )


def _behind(moment: Tensor, height: int) -> Tensor:
    """Share of a row's error that each later row compensates, by block: ``(blocks, height, height)``."""
    behind = moment.new_zeros(-(-len(moment) // height), height, height)
    for block, start in zip(behind, range(0, len(moment), height), strict=True):
        root = root_of(moment[start : start + height, start : start + height])
        block[: len(root), : len(root)] = ahead_of(root)
    return behind


class _Work:
    """A matrix being quantised, in blocks of rows.

    Args:
        behind: from ``_behind``.
        targets: the matrix, ``(height, blocks, pieces, width)``; errors of rows change later rows.
        fitted: scales and zero points, ``(height, blocks, pieces, 1)``; None: a group's come with its first piece.
    """

    def __init__(
        self, order: Order, behind: Tensor, targets: Tensor, levels: Levels, fitted: Sequence[Tensor] | None
    ) -> None:
        self._order, self._behind, self._targets, self._levels = order, behind, targets, levels
        self._compensation = torch.zeros_like(targets)
        self.numbers = torch.zeros_like(targets)
        self._is_fitted = fitted is not None
        self.scale, self.zeros = fitted or (torch.ones_like(targets[..., :1]) for _ in range(2))

    def step(self, step: int) -> None:
        """Quantise piece p of row ``step - p`` of every block, for all p with such a row."""
        height, _, count, width = self._targets.shape
        first, end = max(0, step - height + 1), min(step + 1, count)
        self._fit(step, first, end)
        pieces = torch.arange(end - 1, first - 1, -1, device=self._targets.device)
        rows = step - pieces
        index = rows, slice(None), pieces
        scale, zeros = self.scale[index], self.zeros[index]
        units = (self._targets[index] - self._compensation[index]) / scale + zeros
        columns = pieces[:, None] * width + torch.arange(width, device=pieces.device)
        ahead = self._order.ahead[columns]
        within = ahead.gather(2, columns[:, None].expand(-1, width, -1))
        self.numbers[index], errors = sweep(units, within, self._levels)
        behind = slice(first * width, None)  # errors are not compensated by earlier columns
        compensation = self._compensation[step - end + 1 : step - first + 1].flatten(2)[..., behind]
        compensation.baddbmm_(errors * scale, ahead[..., behind])
        if height > 1:
            missed = self._targets[index] - (self.numbers[index] - zeros) * scale
            self._targets[:, :, pieces] -= torch.einsum("bka,kbp->abkp", self._behind[:, rows], missed)

    def _fit(self, step: int, first: int, end: int) -> None:
        each = self._order.layout.columns.shape[1] // self._order.layout.width
        groups = torch.arange(-(-first // each), -(-end // each), device=self._targets.device)
        if self._is_fitted or not len(groups):
            return
        rows, starts = (step - groups * each)[:, None], (groups * each)[:, None]
        index = rows, slice(None), starts + torch.arange(each, device=groups.device)
        values = (self._targets[index] - self._compensation[index]).transpose(1, 2).flatten(2)
        scale, zeros = self._levels.fitted(values, self._order.weights[groups])
        self.scale[index], self.zeros[index] = scale[:, None], zeros[:, None]
