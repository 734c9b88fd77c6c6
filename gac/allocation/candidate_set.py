"""Candidates as columns: the choices of one site, or of some of its weights, one a row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gac.allocation.latencies import UNKNOWN, sum_of_latencies
from gac.core.arrays import Floats, Ints
from gac.plan.costs import COSTS, PARAMS
from gac.plan.plan import Candidate


@dataclass(frozen=True, eq=False)
class CandidateSet:
    """Candidates of one site, or of some of its weights, one a row.

    Attributes:
        site: the site's name.
        columns: the names of the costs, see ``gac.plan.costs``.
        forms: form name of each weight, shape ``(n, weights)``, dtype str.
        schemes: scheme name of each weight, likewise.
        dims: dim of each weight, shape ``(n, weights)``.
        loss: predicted loss increase in nats a token, shape ``(n,)``.
        costs: one column a name, latencies rounded up to ns and -1 where unknown, shape ``(n, columns)``.
        interpolated: how many of the weights' latencies were interpolated, ``(n, workloads)``.
        modelled: how many were modelled, likewise.
        width: output features of the GEMM that weights share, as long as its latency is not in ``costs``,
            ``(n, workloads)``; over several GPUs the numbers that are gathered after it stand beside them.
        shared: whether the first GEMMs of its fused weights run as one, shape ``(n,)``.
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
        """One column, shape ``(n,)``."""
        return self.costs[:, self.columns.index(column)]

    def known(self, columns: Iterable[str]) -> NDArray[np.bool_]:
        """Which of them have all of these costs, shape ``(n,)``."""
        found: NDArray[np.bool_] = np.all([self.cost(column) != UNKNOWN for column in columns], axis=0)
        return found

    @property
    def params(self) -> Ints:
        """Exact parameters, shape ``(n,)``."""
        return self.cost(PARAMS)

    @property
    def latency(self) -> Ints:
        """ns for each workload, shape ``(n, workloads)``."""
        return self.costs[:, len(COSTS) :]

    def candidate(self, row: int) -> Candidate:
        """One of them as plans have it."""
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

    def at(self, cut: slice | Ints | NDArray[np.bool_]) -> "CandidateSet":
        """Some of the candidates."""
        columns: dict[str, Any] = {name: getattr(self, name)[cut] for name in _ARRAYS}
        return replace(self, **columns)

    def beside(self, other: "CandidateSet") -> "CandidateSet":
        """Row by row, the choices of these weights with those of the other ones."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _ARRAYS}
        columns: dict[str, Any] = {name: np.concatenate(pairs[name], axis=1) for name in ("forms", "schemes", "dims")}
        columns |= {name: np.add(*pairs[name]) for name in ("loss", "interpolated", "modelled", "width")}
        return replace(self, **columns, costs=sum_of_latencies(*pairs["costs"]), shared=self.shared | other.shared)

    @classmethod
    def joined(cls, parts: Sequence["CandidateSet"]) -> "CandidateSet":
        """The candidates of one site, from several sets, one after the other."""
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        return replace(parts[0], **columns)


_ARRAYS = tuple(field.name for field in fields(CandidateSet))[2:]
