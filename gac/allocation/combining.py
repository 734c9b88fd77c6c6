"""Choices of several weights, combined and reduced to those that no other one beats."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.latencies import UNKNOWN
from gac.allocation.pareto import front, front_of_each_kind
from gac.allocation.rivals import Rivals
from gac.core.arrays import Floats, Ints
from gac.plan.costs import COSTS

Numbers = TypeVar("Numbers", Floats, Ints)
Gemm = Callable[[Ints], Ints]
"""Latency of a shared GEMM at each of its widths, both of shape ``(n, workloads)``; -1 where unknown."""

_BATCH = 1 << 20


def combined(
    options: Sequence[CandidateSet], limited: Sequence[str], rivals: Rivals, lost: float = 0.0
) -> CandidateSet | None:
    """Every combination of the weights' choices, reduced; None where no combination is left.

    Args:
        options: of each weight, or of some of them together, already reduced.
        rivals: candidates of the site that are known; what they beat is left out.
        lost: what each combination loses besides.
    """
    besides = np.zeros(len(limited) + 1)
    besides[min(1, len(limited))] = lost
    picked = rivals.unbeaten([criteria_of(own, limited) for own in options], besides)
    if picked is None:
        rows = reduce(partial(_pairs, limited=limited), options)
    elif len(picked[0]):
        rows = reduced(reduce(CandidateSet.beside, map(CandidateSet.at, options, picked)), limited)
    else:
        return None
    return replace(rows, loss=rows.loss + lost)


def combined_sharing(options: Sequence[CandidateSet], limited: Sequence[str], gemm: Gemm) -> CandidateSet:
    """Every combination of the choices of weights that share a GEMM, reduced as it will be with the GEMM's latency.

    Its width is known once the last weight is there. So there the latency counts at once: rows of all widths are
    compared, which leaves far fewer than those of each width by themselves, and no other rows in the end.
    """
    *before, last = options
    if all(column in COSTS for column in limited):
        return reduce(partial(_pairs, limited=limited), options)
    if not before:
        return last
    return _pairs(reduce(partial(_pairs, limited=limited), before), last, limited, gemm)


def _pairs(left: CandidateSet, right: CandidateSet, limited: Sequence[str], gemm: Gemm | None = None) -> CandidateSet:
    """Every left row beside every right row, reduced; in batches of left rows, so that memory stays bounded."""
    width = max(1, _BATCH // len(right))
    parts = []
    for start in range(0, len(left), width):
        part = left.at(slice(start, start + width))
        criteria = _sums(criteria_of(part, limited), criteria_of(right, limited))
        if gemm is None:
            mask = _front(criteria, _sums(_widths(part, limited), _widths(right, limited)))
        else:
            ns = gemm(_sums(part.width, right.width))
            mask = front(criteria + _placed(list(_latencies(ns, part, limited)), np.zeros(len(ns))))
        kept = np.flatnonzero(mask)
        at_left, at_right = np.divmod(kept, len(right))
        parts.append(part.at(at_left).beside(right.at(at_right)))
    return parts[0] if len(parts) == 1 else reduced(CandidateSet.joined(parts), limited)


def _sums(left: Numbers, right: Numbers) -> Numbers:
    """Every left row with every right row added to it, left rows outermost."""
    sums: Numbers = (left[:, None, :] + right[None, :, :]).reshape(len(left) * len(right), left.shape[1])
    return sums


def reduced(rows: CandidateSet, limited: Sequence[str]) -> CandidateSet:
    """Without the rows that another one beats or equals; an unknown latency is worse than any known one."""
    return rows.at(_front(criteria_of(rows, limited), _widths(rows, limited)))


def criteria_of(rows: CandidateSet, limited: Sequence[str]) -> Floats:
    """Loss and what is limited; a latency is infinite where unknown (exact integers below 2**53)."""
    return _placed([_comparable(rows.cost(column)) for column in limited], rows.loss)


def _comparable(costs: Ints) -> Floats:
    return np.where(costs == UNKNOWN, np.inf, costs)


def _placed(columns: Sequence[Floats], loss: Floats) -> Floats:
    return np.stack([*columns[:1], loss, *columns[1:]], axis=1).astype(np.float64)


def _latencies(ns: Ints, rows: CandidateSet, limited: Sequence[str]) -> Iterator[Floats]:
    """What a GEMM adds to each limited column of these rows, from its latency for all workloads."""
    for column in limited:
        at = rows.columns.index(column) - len(COSTS)
        yield _comparable(ns[:, at]) if at >= 0 else np.zeros(len(ns))


def _widths(rows: CandidateSet, limited: Sequence[str]) -> Ints:
    """What is shared by weights of the rows, for the workloads whose latency is limited."""
    ours = [rows.columns.index(column) - len(COSTS) for column in limited if column not in COSTS]
    starts = range(0, rows.width.shape[1], max(1, len(rows.columns) - len(COSTS)))
    return rows.width[:, [start + one for start in starts for one in ours]]


def _front(criteria: Floats, widths: Ints) -> NDArray[np.bool_]:
    """The rows that no other one beats or equals.

    The latency of a shared GEMM may fall as it gets wider: until it is known, only rows of one width are compared.
    """
    return front_of_each_kind(criteria, widths) if widths.any() else front(criteria)
