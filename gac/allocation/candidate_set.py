"""Candidates as columns: forms, dims, schemes, losses and costs of some weights; their Pareto-optimal combinations."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from gac.allocation.latencies import UNKNOWN, Latencies, sum_of_latencies
from gac.allocation.pareto import ParetoSet, nondominated
from gac.core.arrays import Floats, Ints
from gac.plan.costs import COSTS, PARAMS
from gac.plan.plan import Candidate

Numbers = TypeVar("Numbers", Floats, Ints)
Gemm = Callable[[Ints], Latencies]
"""Latencies of a shared GEMM at each of its widths, of shape ``(n, workloads)``."""

_BATCH = 1 << 20


@dataclass(frozen=True, eq=False)
class CandidateSet:
    """Candidates of a site, or of some of its weights, one a row.

    Attributes:
        columns: the names of the costs, see ``gac.plan.costs``.
        forms, schemes, dims: of each weight, shape ``(n, weights)``.
        loss: predicted loss increase in nats a token, shape ``(n,)``.
        costs: one column a name, latencies rounded up to ns and -1 where unknown, shape ``(n, columns)``.
        interpolated, modelled: how many of the weights' latencies were, ``(n, workloads)``.
        width: output features of the GEMM that weights share, as long as its latency is not in ``costs``,
            ``(n, workloads)``; over several GPUs followed by the numbers that are gathered after it.
        shared: true where the first GEMMs of its fused weights run as one, shape ``(n,)``.
    """

    site: str
    columns: tuple[str, ...]
    forms: NDArray[np.str_]
    schemes: NDArray[np.str_]
    dims: Ints
    loss: Floats
    costs: Ints
    interpolated: Ints
    modelled: Ints
    width: Ints
    shared: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.loss)

    def cost(self, column: str) -> Ints:
        return self.costs[:, self.columns.index(column)]

    def known(self, columns: Iterable[str]) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = np.all([self.cost(column) != UNKNOWN for column in columns], axis=0)
        return mask

    @property
    def params(self) -> Ints:
        return self.cost(PARAMS)

    @property
    def latency(self) -> Ints:
        """ns for each workload, shape ``(n, workloads)``."""
        return self.costs[:, len(COSTS) :]

    def candidate(self, row: int) -> Candidate:
        return Candidate(
            forms=tuple(self.forms[row].tolist()),
            schemes=tuple(self.schemes[row].tolist()),
            dims=tuple(self.dims[row].tolist()),
            params=int(self.params[row]),
            loss=float(self.loss[row]),
            latency_ns=tuple(None if ns == UNKNOWN else ns for ns in self.latency[row].tolist()),
            interpolated=tuple(self.interpolated[row].tolist()),
            shared=bool(self.shared[row]),
            modelled=tuple(self.modelled[row].tolist()),
        )

    def of_sites(self, row: int) -> tuple[Candidate, ...]:
        """Return what a candidate is for each of its sites."""
        return (self.candidate(row),)

    def pick(self, rows: slice | Ints | NDArray[np.bool_]) -> Self:
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return replace(self, **columns)

    def paired(self, other: "CandidateSet") -> "CandidateSet":
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _ARRAYS}
        columns: dict[str, Any] = {name: np.concatenate(pairs[name], axis=1) for name in ("forms", "schemes", "dims")}
        columns |= {name: np.add(*pairs[name]) for name in ("loss", "interpolated", "modelled", "width")}
        return replace(self, **columns, costs=sum_of_latencies(*pairs["costs"]), shared=self.shared | other.shared)

    @classmethod
    def concatenate(cls, parts: Sequence["CandidateSet"]) -> "CandidateSet":
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        return replace(parts[0], **columns)


_ARRAYS = tuple(field.name for field in fields(CandidateSet))[2:]


# --- combinations of several weights --------------------------------------------------------------------------------


def cross_product(
    options: Sequence[CandidateSet], limited: Sequence[str], known: ParetoSet, extra: float = 0.0
) -> CandidateSet | None:
    """Return the Pareto-optimal combinations of choices, each with an extra loss; None where none is left."""
    besides = np.append(np.zeros(len(limited)), extra)
    picked = known.nondominated([criteria_of(rows, limited) for rows in options], besides)
    if picked is None:
        rows = reduce(partial(_pairs, limited=limited), options)
    elif len(picked[0]):
        rows = pareto_optimal(reduce(CandidateSet.paired, map(CandidateSet.pick, options, picked)), limited)
    else:
        return None
    return replace(rows, loss=rows.loss + extra)


def cross_product_fused(options: Sequence[CandidateSet], limited: Sequence[str], gemm: Gemm) -> CandidateSet:
    """Return the combinations of weights that share a GEMM which are Pareto-optimal with the GEMM's latency.

    Its width is known with the last weight. So there the latency counts at once: rows of all widths are
    compared, which leaves far fewer than those of each width by themselves, and no other rows in the end.
    """
    pairs, (*before, last) = partial(_pairs, limited=limited), options
    if not before or all(column in COSTS for column in limited):
        return reduce(pairs, options)
    return _pairs(reduce(pairs, before), last, limited, gemm)


def _pairs(left: CandidateSet, right: CandidateSet, limited: Sequence[str], gemm: Gemm | None = None) -> CandidateSet:
    """The Pareto-optimal pairs of a left and a right row; in batches of left rows, so that memory stays bounded."""
    batch = max(1, _BATCH // len(right))
    parts = []
    for start in range(0, len(left), batch):
        part = left.pick(slice(start, start + batch))
        if gemm is None:
            criteria = _sums(_compared(part, limited), _compared(right, limited))
        else:
            criteria = _sums(criteria_of(part, limited), criteria_of(right, limited))
            ns, _ = gemm(_sums(part.width, right.width))
            for place, column in enumerate(limited):
                if column not in COSTS:
                    criteria[:, place] += _infinite_where_unknown(ns[:, part.columns.index(column) - len(COSTS)])
        mask = nondominated(criteria)
        from_left, from_right = np.divmod(np.flatnonzero(mask), len(right))
        parts.append(part.pick(from_left).paired(right.pick(from_right)))
    return parts[0] if len(parts) == 1 else pareto_optimal(CandidateSet.concatenate(parts), limited)


def _sums(left: Numbers, right: Numbers) -> Numbers:
    sums: Numbers = (left[:, None, :] + right[None, :, :]).reshape(len(left) * len(right), left.shape[1])
    return sums


def pareto_optimal(rows: CandidateSet, limited: Sequence[str]) -> CandidateSet:
    return rows.pick(nondominated(_compared(rows, limited)))


def criteria_of(rows: CandidateSet, limited: Sequence[str]) -> Floats:
    """Return limited costs and loss; a latency is infinite where unknown (exact integers below 2**53)."""
    return np.stack([*(_infinite_where_unknown(rows.cost(column)) for column in limited), rows.loss], axis=1)


def _infinite_where_unknown(costs: Ints) -> Floats:
    return np.where(costs == UNKNOWN, np.inf, costs)


def _compared(rows: CandidateSet, limited: Sequence[str]) -> Floats:
    """The criteria, and the width of a shared GEMM of which the latency is not yet known, with both signs.

    The latency may fall as the GEMM gets wider: so only rows of one width are compared.
    """
    workloads = [rows.columns.index(column) - len(COSTS) for column in limited if column not in COSTS]
    starts = range(0, rows.width.shape[1], max(1, len(rows.columns) - len(COSTS)))
    width = rows.width[:, [start + workload for start in starts for workload in workloads]]
    return np.hstack([criteria_of(rows, limited), width, -width])
