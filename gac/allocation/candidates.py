"""From loss curves and a latency table to the candidates of a site."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gac.allocation.latencies import UNKNOWN, Timing, recorded, sum_of_latencies
from gac.allocation.pareto import front
from gac.arrays import Floats, Ints
from gac.costs import COSTS, PARAMS, columns_of
from gac.curves import LossCurve, LossCurves
from gac.errors import ProfileError
from gac.forms import Form, form_named
from gac.models.sites import Site
from gac.models.weights import Weight
from gac.plan import Candidate
from gac.profiling.table import Profile
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named
from gac.workloads import Workload

_BATCH = 1 << 20


@dataclass(frozen=True, eq=False)
class CandidateSet:
    """Candidates of one site, or of some of its weights, one a row.

    Attributes:
        site: the site's name.
        columns: the names of the costs, see ``gac.costs``.
        forms: form name of each weight, shape ``(n, weights)``, dtype str.
        schemes: scheme name of each weight, likewise.
        dims: dim of each weight, shape ``(n, weights)``.
        loss: predicted loss increase in nats a token, shape ``(n,)``.
        costs: one column a name, latencies rounded up to ns and -1 where unknown, shape ``(n, columns)``.
        interpolated: how many of the weights' latencies were interpolated, ``(n, workloads)``.
        width: output features of the GEMM that weights share, as long as its latency is not in ``costs``,
            ``(n, workloads)``.
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
    width: Ints
    shared: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.loss)

    def cost(self, column: str) -> Ints:
        """One column, shape ``(n,)``."""
        return self.costs[:, self.columns.index(column)]

    @property
    def params(self) -> Ints:
        """Exact parameters, shape ``(n,)``."""
        return self.cost(PARAMS)

    @property
    def latency(self) -> Ints:
        """ns for each workload, shape ``(n, workloads)``."""
        return self.costs[:, len(COSTS) :]

    def row(self, index: int) -> "CandidateSet":
        """One candidate, as a set of one."""
        return self.at(slice(index, index + 1))

    def at(self, cut: slice | Ints | NDArray[np.bool_]) -> "CandidateSet":
        """Some of the candidates."""
        columns: dict[str, Any] = {name: getattr(self, name)[cut] for name in _ARRAYS}
        return replace(self, **columns)

    @classmethod
    def joined(cls, parts: Sequence["CandidateSet"]) -> "CandidateSet":
        """The candidates of one site, from several sets, one after the other."""
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        return replace(parts[0], **columns)


def candidate_of(rows: CandidateSet, row: int) -> Candidate:
    """One of the candidates as records have it."""
    return Candidate(
        forms=tuple(rows.forms[row].tolist()),
        schemes=tuple(rows.schemes[row].tolist()),
        dims=tuple(rows.dims[row].tolist()),
        params=int(rows.params[row]),
        loss=float(rows.loss[row]),
        latency_ns=recorded(rows.latency[row]),
        interpolated=tuple(rows.interpolated[row].tolist()),
        shared=bool(rows.shared[row]),
    )


_ARRAYS = tuple(field.name for field in fields(CandidateSet))[2:]


def candidates(
    site: Site,
    curves: LossCurves,
    *,
    forms: Sequence[str],
    profile: Profile | None,
    workloads: Sequence[Workload],
    align: bool | int,
    limited: Collection[str],
    schemes: Sequence[str] = (DEFAULT_SCHEME,),
    triton: bool = False,
) -> CandidateSet:
    """Every form, scheme and dim worth choosing for a site, sorted by parameters and then loss.

    Each weight may stay dense or take a form of its own at one of its dims; those that a form shortens together
    (``narrow``, ``head_dim``) may instead take one of its dims, the same for all. Where first GEMMs are fused, the
    latency is that of the one GEMM, at its own width, and of what is left of each weight; where they may be, candidates
    of both kinds compete. The combinations of several weights are reduced to those that no other one beats or equals in
    loss and in all that is limited, which loses no optimum as long as nothing else is; of two that are equal and run
    differently, the faster stays. The dense site always stays, where it may be stored as it was loaded.

    Args:
        curves: of the model.
        forms: which forms besides dense.
        align: only dims that the profile shows to be sound for all workloads, and of those the multiples of the number
            that is given (all of its multiples where there is no profile); False: every integer dim.
        limited: the cost columns in which choices will be limited.
        schemes: how numbers may be stored; weights that share a GEMM have one scheme, and so do those that a form
            takes together.
        triton: whether GEMMs of one row run in Triton.

    Raises:
        ProfileError: ``align`` without a profile.
        PlanError: a form or a scheme is unknown.
    """
    if align is True and profile is None:
        raise ProfileError(
            "align=True without a profile",
            "a profile that shows which dims are sound",
            "Name a profile, a number to align to, or align=False.",
        )
    space = _Space(
        tuple(form_named(name) for name in dict.fromkeys(forms)),
        tuple(scheme_named(name) for name in dict.fromkeys(schemes)),
        curves,
        Timing(profile, tuple(workloads), triton),
        align,
        tuple(column for column in columns_of(workloads) if column in limited),
    )
    parts = [part for layout in site.layouts for part in space.of_layout(layout)]
    rows = CandidateSet.joined(parts)
    if site.either:
        rows = _fastest_first(rows, site, space.timing)
    if len(parts) > 1:
        rows = _reduced(rows, space.limited)
    return _sorted(_with_dense(rows, site, space.timing) if DEFAULT_SCHEME in schemes else rows)


def dense_candidate(
    site: Site, *, profile: Profile | None, workloads: Sequence[Workload], triton: bool = False
) -> CandidateSet:
    """The dense site as its only candidate: what a plan's costs are set beside.

    Where its weights may be fused or not, they are not: so the model runs that is compressed.
    """
    return _dense(site, Timing(profile, tuple(workloads), triton))


def candidate_at(site: Site, forms: Sequence[str], dims: Sequence[int], loss: float, timing: Timing) -> CandidateSet:
    """One form and dim a weight as the site's only candidate, with a loss that is known already.

    Where its weights may be fused or not, they are as is faster.
    """
    as_forms, as_dims = [form_named(name) for name in forms], [np.array([dim]) for dim in dims]
    scheme = scheme_named(DEFAULT_SCHEME)
    rows = CandidateSet.joined([_side_by_side(layout, as_forms, as_dims, scheme, timing) for layout in site.layouts])
    return replace(_fastest_first(rows, site, timing).row(0), loss=np.array([loss]))


@dataclass(frozen=True, eq=False)
class _Space:
    """What candidates are made from, and what will be limited."""

    forms: tuple[Form, ...]
    schemes: tuple[Scheme, ...]
    curves: LossCurves
    timing: Timing
    align: bool | int
    limited: tuple[str, ...]

    def of_layout(self, site: Site) -> list[CandidateSet]:
        """All that a site may become where it is known what is fused."""
        if site.fused and len(self.schemes) > 1:
            return [part for scheme in self.schemes for part in replace(self, schemes=(scheme,)).of_layout(site)]
        own = self._one_by_one(site)
        rows = [_combinations(site, own, self.timing, self.limited)]
        for form in self.forms:
            for scheme in self.schemes if (taken := site.taken_by(form)) else ():
                (key,) = (weight for weight in site.weights if form.shortens(weight) == "in")
                if curve := self.curves.of(form, key, scheme.name):
                    rows += self._together(form, scheme, site, taken, curve, own)
        return rows

    def _one_by_one(self, site: Site) -> list[CandidateSet]:
        """Each weight's own choices."""
        found = []
        for at, weight in enumerate(site.weights):
            fused, options = at in site.fused, []
            for scheme in (scheme for scheme in self.schemes if scheme.takes(weight)):
                dense = form_named("dense")
                lost = self.curves.of(dense, weight, scheme.name)
                options.append(_options(site, dense, scheme, weight, _full(weight), lost, self.timing, fused))
                for form in (form for form in self.forms if form.takes(weight) and not form.shortens(weight)):
                    if curve := self.curves.of(form, weight, scheme.name):
                        dims = self._dims(form, [weight], form.largest_useful(weight), [fused])
                        options.append(_options(site, form, scheme, weight, dims, curve, self.timing, fused))
            found.append(CandidateSet.joined(options))
        return found

    def _together(
        self,
        form: Form,
        scheme: Scheme,
        site: Site,
        taken: Sequence[int],
        curve: LossCurve,
        own: Sequence[CandidateSet],
    ) -> list[CandidateSet]:
        """One dim, below the full one, for all weights that a form takes together, beside the others' own choices."""
        weights, fused = [site.weights[at] for at in taken], [at in site.fused for at in taken]
        dims = self._dims(form, weights, curve.full - 1, fused)
        if len(taken) == len(own):
            rows = _side_by_side(site, [form] * len(own), [dims] * len(own), scheme, self.timing)
            return [replace(rows, loss=curve.loss[dims])]
        found = []
        for dim in dims.tolist():
            options, at_dim = list(own), np.array([dim])
            for at in taken:
                joins = at in site.fused
                options[at] = _options(site, form, scheme, site.weights[at], at_dim, None, self.timing, joins)
            rows = _combinations(site, options, self.timing, self.limited)
            found.append(replace(rows, loss=rows.loss + curve.loss[dim]))
        return found

    def _dims(self, form: Form, weights: Sequence[Weight], largest: int, fused: Sequence[bool]) -> Ints:
        """The dims from 1 to the largest, and of those the aligned and sound ones where dims are to be aligned."""
        dims = np.arange(1, largest + 1, dtype=np.int64)
        if self.align:
            dims = dims[dims % step_of(form, self.align) == 0]
        if self.align and self.timing.profile is not None:
            for weight, joins in zip(weights, fused, strict=True):
                dims = dims[self.timing.sound(form, weight, dims, joins)]
        return dims


def _fastest_first(rows: CandidateSet, site: Site, timing: Timing) -> CandidateSet:
    """By the sum over the workloads of the latency over the dense site's, unknown ones last; else as they were."""
    dense = _dense(site, timing).latency
    known = ((rows.latency != UNKNOWN) & (dense != UNKNOWN)).all(axis=1)
    return rows.at(np.argsort(np.where(known, (rows.latency / np.abs(dense)).sum(axis=1), np.inf), kind="stable"))


def _combinations(site: Site, options: Sequence[CandidateSet], timing: Timing, limited: Sequence[str]) -> CandidateSet:
    """All combinations of the weights' choices, reduced after each weight."""
    rows: CandidateSet | None = None
    for at, (weight, own) in enumerate(zip(site.weights, options, strict=True)):
        rows = own if rows is None else _combined(rows, own, limited)
        if site.fused and at == site.fused[-1]:
            rows = _reduced(_with_fused_gemm(rows, weight.in_features, timing), limited)
    assert rows is not None, "a site without weights"
    return rows


def _dense(site: Site, timing: Timing) -> CandidateSet:
    dense, dims = [form_named("dense")] * len(site.weights), [_full(weight) for weight in site.weights]
    return _side_by_side(site.layouts[0], dense, dims, scheme_named(DEFAULT_SCHEME), timing)


def _side_by_side(
    site: Site, forms: Sequence[Form], dims: Sequence[Ints], scheme: Scheme, timing: Timing
) -> CandidateSet:
    """Every weight in its form, each at its dims, row by row; no loss is looked up."""
    rows: CandidateSet | None = None
    for at, (weight, form, ours) in enumerate(zip(site.weights, forms, dims, strict=True)):
        part = _options(site, form, scheme, weight, ours, None, timing, at in site.fused)
        rows = part if rows is None else _beside(rows, part)
        if site.fused and at == site.fused[-1]:
            rows = _with_fused_gemm(rows, weight.in_features, timing)
    assert rows is not None, "a site without weights"
    return rows


def step_of(form: Form, align: bool | int) -> int:
    """What the dims of a form are multiples of, whatever the profile says of them."""
    return lcm(form.step, int(align)) if align else 1


def _full(weight: Weight) -> Ints:
    return np.array([form_named("dense").full(weight)])


def _options(
    site: Site,
    form: Form,
    scheme: Scheme,
    weight: Weight,
    dims: Ints,
    curve: LossCurve | None,
    timing: Timing,
    fused: bool,
) -> CandidateSet:
    """One weight in one form and scheme at each of the dims."""
    count = len(dims)
    latency, measured = (timing.after_fused if fused else timing.of_weight)(form, weight, dims, scheme)
    counted = [[cost(form, scheme, weight, dim) for cost in COSTS.values()] for dim in dims.tolist()]
    return CandidateSet(
        site.name,
        columns_of(timing.workloads),
        forms=np.full((count, 1), form.name),
        schemes=np.full((count, 1), scheme.name),
        dims=dims[:, None],
        loss=np.zeros(count) if curve is None else curve.loss[dims],
        costs=np.concatenate([np.array(counted, dtype=np.int64).reshape(count, len(COSTS)), latency], axis=1),
        interpolated=((latency != UNKNOWN) & ~measured).astype(np.int64),
        width=timing.joined(form, weight, dims) if fused else np.zeros_like(latency),
        shared=np.full(count, fused),
    )


def _with_fused_gemm(rows: CandidateSet, in_features: int, timing: Timing) -> CandidateSet:
    """The same rows with the latency of the GEMM that their weights share, which is then accounted for."""
    latency, measured = timing.of_fused(in_features, rows.width, scheme_named(str(rows.schemes[0, -1])))
    counted = np.concatenate([np.zeros((len(rows), len(COSTS)), dtype=np.int64), latency], axis=1)
    return replace(
        rows,
        costs=sum_of_latencies(rows.costs, counted),
        interpolated=rows.interpolated + ((latency != UNKNOWN) & ~measured),
        width=np.zeros_like(rows.width),
    )


def _beside(left: CandidateSet, right: CandidateSet) -> CandidateSet:
    """Row by row, the choices of the left weights with those of the right ones."""
    return replace(
        left,
        forms=np.concatenate([left.forms, right.forms], axis=1),
        schemes=np.concatenate([left.schemes, right.schemes], axis=1),
        dims=np.concatenate([left.dims, right.dims], axis=1),
        loss=left.loss + right.loss,
        costs=sum_of_latencies(left.costs, right.costs),
        interpolated=left.interpolated + right.interpolated,
        width=left.width + right.width,
        shared=left.shared | right.shared,
    )


def _combined(left: CandidateSet, right: CandidateSet, limited: Sequence[str]) -> CandidateSet:
    """Every left row beside every right row, reduced; in batches of left rows, so that memory stays bounded."""
    width = max(1, _BATCH // len(right))
    parts = []
    for start in range(0, len(left), width):
        part = left.at(np.arange(start, min(start + width, len(left))))
        widths = _limited_widths(part, limited)[:, None] + _limited_widths(right, limited)[None, :]
        widths = widths.reshape(len(part) * len(right), -1)
        kept = np.flatnonzero(_front(_pair_criteria(part, right, limited), widths))
        at_left, at_right = np.divmod(kept, len(right))
        parts.append(_beside(part.at(at_left), right.at(at_right)))
    return parts[0] if len(parts) == 1 else _reduced(CandidateSet.joined(parts), limited)


def _pair_criteria(left: CandidateSet, right: CandidateSet, limited: Sequence[str]) -> Floats:
    """The criteria of every left row beside every right row, left rows outermost."""
    first, second = _criteria(left, limited), _criteria(right, limited)
    return (first[:, None, :] + second[None, :, :]).reshape(-1, first.shape[1])


def _criteria(rows: CandidateSet, limited: Sequence[str]) -> Floats:
    """Loss and what is limited; a latency is infinite where unknown (exact integers below 2**53)."""
    columns = [np.where(rows.cost(column) == UNKNOWN, np.inf, rows.cost(column)) for column in limited]
    return np.stack([*columns[:1], rows.loss, *columns[1:]], axis=1).astype(np.float64)


def _reduced(rows: CandidateSet, limited: Sequence[str]) -> CandidateSet:
    """Without the rows that another one beats or equals; an unknown latency is worse than any known one."""
    return rows.at(_front(_criteria(rows, limited), _limited_widths(rows, limited)))


def _limited_widths(rows: CandidateSet, limited: Sequence[str]) -> Ints:
    """The widths of shared GEMMs for the workloads whose latency is limited."""
    return rows.width[:, [rows.columns.index(column) - len(COSTS) for column in limited if column not in COSTS]]


def _front(criteria: Floats, widths: Ints) -> NDArray[np.bool_]:
    """The rows that no other one beats or equals.

    The latency of a shared GEMM may fall as it gets wider: until it is known, only rows of one width are compared.
    """
    if not widths.any():
        return front(criteria)
    mask = np.zeros(len(widths), dtype=np.bool_)
    order = np.lexsort(widths.T)
    for same in np.split(order, np.flatnonzero(np.diff(widths[order], axis=0).any(axis=1)) + 1):
        mask[same[front(criteria[same])]] = True
    return mask


def _with_dense(rows: CandidateSet, site: Site, timing: Timing) -> CandidateSet:
    dense = _dense(site, timing)
    same = [(getattr(rows, name) == getattr(dense, name)).all(axis=1) for name in ("forms", "schemes", "dims")]
    found = np.logical_and.reduce([*same, rows.shared == dense.shared])
    return rows if found.any() else CandidateSet.joined([rows, dense])


def _sorted(rows: CandidateSet) -> CandidateSet:
    return rows.at(np.lexsort((rows.loss, rows.params)))
