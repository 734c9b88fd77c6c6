"""Candidates as columns: forms, dims, schemes, losses and costs of a site, or of some of its weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gac.allocation.latencies import (
    INTERPOLATED,
    MODELLED,
    UNKNOWN,
    Timing,
    add,
    attention_latency,
    sum_of_latencies,
)
from gac.core.arrays import Floats, Ints
from gac.forms import Form
from gac.forms.loss_curves import LossCurve
from gac.models.sites import Site
from gac.plan.costs import COSTS, PARAMS, columns_of
from gac.plan.plan import Candidate
from gac.schemes import Scheme, scheme_named


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

    def pick(self, rows: slice | Ints | NDArray[np.bool_]) -> "CandidateSet":
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


def weight_candidates(
    site: Site, position: int, form: Form, scheme: Scheme, dims: Ints, curve: LossCurve | None, timing: Timing
) -> CandidateSet:
    """Return one weight of a site in one form and scheme at each of the dims, without loss where there is no curve."""
    weight, fused, count = site.weights[position], position in site.fused, len(dims)

    def without_loss() -> CandidateSet:
        latency, source = (timing.after_fused if fused else timing.of_weight)(form, weight, dims, scheme)
        latency, source = add((latency, source), attention_latency(timing, form, weight, dims))
        latency = sum_of_latencies(latency, timing.launches(form, weight, dims))
        costs = [[cost.of_choice(form, scheme, weight, dim) for cost in COSTS.values()] for dim in dims.tolist()]
        return CandidateSet(
            site.name,
            columns_of(timing.workloads),
            forms=np.full((count, 1), form.name),
            schemes=np.full((count, 1), scheme.name),
            dims=dims[:, None],
            loss=np.zeros(count),
            costs=np.concatenate([np.array(costs, dtype=np.int64).reshape(count, len(COSTS)), latency], axis=1),
            **_marks(latency, source),
            width=timing.shared_width(form, weight, dims) if fused else timing.no_width(count),
            shared=np.full(count, fused),
        )

    rows = timing.once((form.name, scheme.name, fused, dims.tobytes()), weight, without_loss)
    return replace(rows, site=site.name, loss=rows.loss if curve is None else curve.loss[dims])


def zip_candidates(
    site: Site, forms: Sequence[Form], dims: Sequence[Ints], scheme: Scheme, timing: Timing
) -> CandidateSet:
    """Return every weight in its form, each at its dims, row by row, without losses."""
    weights = enumerate(zip(forms, dims, strict=True))
    rows = reduce(
        CandidateSet.paired,
        [weight_candidates(site, position, form, scheme, its, None, timing) for position, (form, its) in weights],
    )
    return with_fused_gemm(rows, site, timing) if site.fused else rows


def with_fused_gemm(rows: CandidateSet, site: Site, timing: Timing) -> CandidateSet:
    """Add the latency of the GEMM that the site's fused weights share."""
    scheme, costs = scheme_named(str(rows.schemes[0, site.fused[0]])), rows.costs.copy()
    latency, source = timing.of_shared(site.weights[site.fused[0]], rows.width, scheme)
    costs[:, len(COSTS) :] = sum_of_latencies(rows.latency, latency)
    uncounted = rows.interpolated + rows.modelled < rows.dims.shape[1]  # no weight counts twice
    counts = {name: getattr(rows, name) + marks * uncounted for name, marks in _marks(latency, source).items()}
    return replace(rows, costs=costs, **counts, width=np.zeros_like(rows.width))


def _marks(latency: Ints, source: Ints) -> dict[str, Ints]:
    sources = {"interpolated": INTERPOLATED, "modelled": MODELLED}
    return {name: ((latency != UNKNOWN) & (source == code)).astype(np.int64) for name, code in sources.items()}
