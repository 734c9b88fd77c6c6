"""From loss curves and a latency table to the candidates of a site."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
from numpy.typing import NDArray

from gac.allocation.latencies import UNKNOWN, Timing, sum_of_latencies
from gac.allocation.pareto import front
from gac.arrays import Floats, Ints
from gac.curves import LossCurve, SiteCurves
from gac.errors import ProfileError
from gac.forms import Form, form_named
from gac.models.sites import Site
from gac.models.weights import Weight
from gac.profiling.table import Profile
from gac.workloads import Workload

_BATCH = 1 << 20


@dataclass(frozen=True)
class Limited:
    """What will be limited: parameters, the latency of these workloads (positions among a problem's), the KV cache."""

    params: bool
    workloads: tuple[int, ...] = ()
    cached: bool = False


@dataclass(frozen=True, eq=False)
class CandidateSet:
    """The candidates of one site, one a row, sorted by params and then loss.

    Attributes:
        site: the site's name.
        forms: form name of each weight, shape ``(n, weights)``, dtype str.
        dims: dim of each weight, shape ``(n, weights)``.
        params: exact parameters, shape ``(n,)``.
        loss: predicted loss increase in nats a token, shape ``(n,)``.
        latency: ns for each workload, rounded up, shape ``(n, workloads)``; -1 where unknown.
        interpolated: how many of the weights' latencies were interpolated, ``(n, workloads)``.
        cached: numbers that the KV cache keeps of a token, shape ``(n,)``.
        shared: whether the first GEMMs of its fused weights run as one, shape ``(n,)``.
    """

    site: str
    forms: NDArray[np.str_]
    dims: Ints
    params: Ints
    loss: Floats
    latency: Ints
    interpolated: Ints
    cached: Ints
    shared: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.params)

    def row(self, index: int) -> "CandidateSet":
        """One candidate, as a set of one."""
        return self.at(slice(index, index + 1))

    def at(self, cut: slice | NDArray[np.bool_]) -> "CandidateSet":
        """Some of the candidates."""
        return CandidateSet(
            self.site,
            self.forms[cut],
            self.dims[cut],
            self.params[cut],
            self.loss[cut],
            self.latency[cut],
            self.interpolated[cut],
            self.cached[cut],
            self.shared[cut],
        )


@dataclass(frozen=True, eq=False)
class _Rows:
    """Candidates of some weights of a site, one a row; columns as in ``CandidateSet``.

    ``width``: output features of the GEMM that the weights share, by workload, as long as its latency is not in
    ``latency``.
    """

    forms: NDArray[np.str_]
    dims: Ints
    params: Ints
    loss: Floats
    latency: Ints
    interpolated: Ints
    cached: Ints
    width: Ints
    shared: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.params)

    def at(self, index: Ints | NDArray[np.bool_]) -> "_Rows":
        return _Rows(*(column[index] for column in vars(self).values()))


def candidates(
    site: Site,
    curves: SiteCurves,
    *,
    forms: Sequence[str],
    profile: Profile | None,
    workloads: Sequence[Workload],
    align: bool | int,
    limited: Limited,
    one_row: bool = False,
) -> CandidateSet:
    """Every form and dim worth choosing for a site.

    Each weight may stay dense or take one of its ranks; those that a form shortens together (``narrow``,
    ``head_dim``) may instead take one of its dims, the same for all. Where first GEMMs are fused, the latency is that
    of the one GEMM, at its own width, and of what is left of each weight; where they may be, candidates of both kinds
    compete. The combinations of several weights are reduced to those that no other one beats or equals in loss and in
    all that is limited, which loses no optimum as long as nothing else is; of two that are equal and run differently,
    the faster stays. The dense site always stays.

    Args:
        forms: which forms besides dense (``low_rank``, ``narrow``, ``head_dim``, ``grouped``).
        align: only dims that the profile shows to be sound for all workloads, and of those the multiples of the number
            that is given (all of its multiples where there is no profile); False: every integer dim.
        limited: what choices will be limited in.
        one_row: whether GEMMs of one row run in Triton.

    Raises:
        ProfileError: ``align`` without a profile.
        PlanError: a form is unknown.
    """
    if align is True and profile is None:
        raise ProfileError(
            "align=True without a profile",
            "a profile that shows which dims are sound",
            "Name a profile, a number to align to, or align=False.",
        )
    timing = Timing(profile, tuple(workloads), one_row)
    allowed = [form_named(name) for name in dict.fromkeys(forms)]
    parts = [part for layout in site.layouts for part in _parts(layout, curves, allowed, timing, align, limited)]
    rows = _concatenated(parts)
    if site.either:
        rows = _fastest_first(rows, site, timing)
    if len(parts) > 1:
        rows = _reduced(rows, limited)
    return _candidate_set(site, _with_dense(rows, site, timing))


def dense_candidate(
    site: Site, *, profile: Profile | None, workloads: Sequence[Workload], one_row: bool = False
) -> CandidateSet:
    """The dense site as its only candidate: what a plan's parameters and latency are set beside.

    Where its weights may be fused or not, they are not: so the model runs that is compressed.
    """
    return _candidate_set(site, _dense(site, Timing(profile, tuple(workloads), one_row)))


def candidate_at(site: Site, forms: Sequence[str], dims: Sequence[int], loss: float, timing: Timing) -> CandidateSet:
    """One form and dim a weight as the site's only candidate, with a loss that is known already.

    Where its weights may be fused or not, they are as is faster.
    """
    as_forms, as_dims = [form_named(name) for name in forms], [np.array([dim]) for dim in dims]
    rows = _concatenated(_side_by_side(layout, as_forms, as_dims, timing) for layout in site.layouts)
    fastest = _fastest_first(rows, site, timing).at(np.array([0]))
    return _candidate_set(site, replace(fastest, loss=np.array([loss])))


def _fastest_first(rows: _Rows, site: Site, timing: Timing) -> _Rows:
    """By the sum over the workloads of the latency over the dense site's, unknown ones last; else as they were."""
    dense = _dense(site, timing).latency
    known = ((rows.latency != UNKNOWN) & (dense != UNKNOWN)).all(axis=1)
    return rows.at(np.argsort(np.where(known, (rows.latency / np.abs(dense)).sum(axis=1), np.inf), kind="stable"))


def _parts(
    site: Site, curves: SiteCurves, forms: Sequence[Form], timing: Timing, align: bool | int, limited: Limited
) -> list[_Rows]:
    """All that a site may become where it is known what is fused."""
    own = _one_by_one(site, curves, forms, timing, align)
    rows = [_combinations(site, own, timing, limited)]
    for form in forms:
        if (taken := site.taken_by(form)) and (curve := _curve(site, form, curves)):
            rows += _together(form, site, taken, curve, own, timing, align, limited)
    return rows


def _one_by_one(
    site: Site, curves: SiteCurves, forms: Sequence[Form], timing: Timing, align: bool | int
) -> list[_Rows]:
    """Each weight's own choices."""
    found = []
    for at, weight in enumerate(site.weights):
        fused = at in site.fused
        options = _options(form_named("dense"), weight, _full(weight), None, timing, fused)
        for form in forms:
            if form.takes(weight) and (curve := curves.alone(form).get(weight.name)):
                dims = _dims(form, [weight], form.largest_useful(weight), timing, align, [fused])
                options = _concatenated([options, _options(form, weight, dims, curve, timing, fused)])
        found.append(options)
    return found


def _combinations(site: Site, options: Sequence[_Rows], timing: Timing, limited: Limited) -> _Rows:
    """All combinations of the weights' choices, reduced after each weight."""
    rows: _Rows | None = None
    for at, (weight, own) in enumerate(zip(site.weights, options, strict=True)):
        rows = own if rows is None else _combined(rows, own, limited)
        if site.fused and at == site.fused[-1]:
            rows = _reduced(_with_fused_gemm(rows, weight.in_features, timing), limited)
    assert rows is not None, "a site without weights"
    return rows


def _curve(site: Site, form: Form, curves: SiteCurves) -> LossCurve | None:
    """What a form loses that shortens several weights, by the one that it shortens on its input."""
    (weight,) = (weight for weight in site.weights if form.shortens(weight) == "in")
    return curves.shorter.get(weight.name)


def _together(
    form: Form,
    site: Site,
    taken: Sequence[int],
    curve: LossCurve,
    own: Sequence[_Rows],
    timing: Timing,
    align: bool | int,
    limited: Limited,
) -> list[_Rows]:
    """One dim, below the full one, for all weights that a form takes together, beside the others' own choices."""
    weights, fused = [site.weights[at] for at in taken], [at in site.fused for at in taken]
    dims = _dims(form, weights, curve.full - 1, timing, align, fused)
    if len(taken) == len(own):
        rows = _side_by_side(site, [form] * len(own), [dims] * len(own), timing)
        return [replace(rows, loss=curve.loss[dims])]
    found = []
    for dim in dims.tolist():
        options = list(own)
        for at in taken:
            options[at] = _options(form, site.weights[at], np.array([dim]), None, timing, at in site.fused)
        rows = _combinations(site, options, timing, limited)
        found.append(replace(rows, loss=rows.loss + curve.loss[dim]))
    return found


def _dense(site: Site, timing: Timing) -> _Rows:
    dense = [form_named("dense")] * len(site.weights)
    return _side_by_side(site.layouts[0], dense, [_full(weight) for weight in site.weights], timing)


def _side_by_side(site: Site, forms: Sequence[Form], dims: Sequence[Ints], timing: Timing) -> _Rows:
    """Every weight in its form, each at its dims, row by row; no loss is looked up."""
    rows: _Rows | None = None
    for at, (weight, form, ours) in enumerate(zip(site.weights, forms, dims, strict=True)):
        part = _options(form, weight, ours, None, timing, at in site.fused)
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


def _dims(
    form: Form, weights: Sequence[Weight], largest: int, timing: Timing, align: bool | int, fused: Sequence[bool]
) -> Ints:
    """The dims from 1 to the largest, and of those the aligned and sound ones where dims are to be aligned."""
    dims = np.arange(1, largest + 1, dtype=np.int64)
    if align:
        dims = dims[dims % step_of(form, align) == 0]
    if align and timing.profile is not None:
        for weight, joins in zip(weights, fused, strict=True):
            dims = dims[timing.sound(form, weight, dims, joins)]
    return dims


def _options(form: Form, weight: Weight, dims: Ints, curve: LossCurve | None, timing: Timing, fused: bool) -> _Rows:
    """One weight in one form at each of the dims."""
    count = len(dims)
    latency, measured = (timing.after_fused if fused else timing.of_weight)(form, weight, dims)
    return _Rows(
        forms=np.full((count, 1), form.name),
        dims=dims[:, None],
        params=np.array([form.params(weight, dim) for dim in dims.tolist()], dtype=np.int64),
        loss=np.zeros(count) if curve is None else curve.loss[dims],
        latency=latency,
        interpolated=((latency != UNKNOWN) & ~measured).astype(np.int64),
        cached=np.array([form.cached(weight, dim) for dim in dims.tolist()], dtype=np.int64),
        width=timing.joined(form, weight, dims) if fused else np.zeros_like(latency),
        shared=np.full(count, fused),
    )


def _with_fused_gemm(rows: _Rows, in_features: int, timing: Timing) -> _Rows:
    """The same rows with the latency of the GEMM that their weights share, which is then accounted for."""
    latency, measured = timing.of_fused(in_features, rows.width)
    return replace(
        rows,
        latency=sum_of_latencies(rows.latency, latency),
        interpolated=rows.interpolated + ((latency != UNKNOWN) & ~measured),
        width=np.zeros_like(rows.width),
    )


def _beside(left: _Rows, right: _Rows) -> _Rows:
    """Row by row, the choices of the left weights with those of the right ones."""
    return _Rows(
        np.concatenate([left.forms, right.forms], axis=1),
        np.concatenate([left.dims, right.dims], axis=1),
        left.params + right.params,
        left.loss + right.loss,
        sum_of_latencies(left.latency, right.latency),
        left.interpolated + right.interpolated,
        left.cached + right.cached,
        left.width + right.width,
        left.shared | right.shared,
    )


def _combined(left: _Rows, right: _Rows, limited: Limited) -> _Rows:
    """Every left row beside every right row, reduced; in batches of left rows, so that memory stays bounded."""
    width, workloads = max(1, _BATCH // len(right)), right.width.shape[1]
    parts = []
    for start in range(0, len(left), width):
        part = left.at(np.arange(start, min(start + width, len(left))))
        widths = (part.width[:, None] + right.width[None, :]).reshape(len(part) * len(right), workloads)
        kept = np.flatnonzero(_front(_pair_criteria(part, right, limited), widths, limited))
        at_left, at_right = np.divmod(kept, len(right))
        parts.append(_beside(part.at(at_left), right.at(at_right)))
    return parts[0] if len(parts) == 1 else _reduced(_concatenated(parts), limited)


def _pair_criteria(left: _Rows, right: _Rows, limited: Limited) -> Floats:
    """The criteria of every left row beside every right row, left rows outermost."""
    first, second = _criteria(left, limited), _criteria(right, limited)
    return (first[:, None, :] + second[None, :, :]).reshape(-1, first.shape[1])


def _criteria(rows: _Rows, limited: Limited) -> Floats:
    """Loss and what is limited; a latency is infinite where unknown (exact integers below 2**53)."""
    columns: list[Ints | Floats] = [rows.params] if limited.params else []
    columns.append(rows.loss)
    if limited.cached:
        columns.append(rows.cached)
    latency = rows.latency[:, list(limited.workloads)]
    columns += list(np.where(latency == UNKNOWN, np.inf, latency).T)
    return np.stack(columns, axis=1).astype(np.float64)


def _reduced(rows: _Rows, limited: Limited) -> _Rows:
    """Without the rows that another one beats or equals; an unknown latency is worse than any known one."""
    return rows.at(_front(_criteria(rows, limited), rows.width, limited))


def _front(criteria: Floats, widths: Ints, limited: Limited) -> NDArray[np.bool_]:
    """The rows that no other one beats or equals.

    The latency of a shared GEMM may fall as it gets wider: until it is known, only rows of one width are compared.
    """
    widths = widths[:, list(limited.workloads)]
    if not widths.any():
        return front(criteria)
    mask = np.zeros(len(widths), dtype=np.bool_)
    order = np.lexsort(widths.T)
    for same in np.split(order, np.flatnonzero(np.diff(widths[order], axis=0).any(axis=1)) + 1):
        mask[same[front(criteria[same])]] = True
    return mask


def _concatenated(parts: Iterable[_Rows]) -> _Rows:
    return _Rows(*(np.concatenate(columns) for columns in zip(*(vars(part).values() for part in parts), strict=True)))


def _with_dense(rows: _Rows, site: Site, timing: Timing) -> _Rows:
    dense = _dense(site, timing)
    same = ((rows.forms == dense.forms) & (rows.dims == dense.dims)).all(axis=1) & (rows.shared == dense.shared)
    return rows if same.any() else _concatenated([rows, dense])


def _candidate_set(site: Site, rows: _Rows) -> CandidateSet:
    rows = rows.at(np.lexsort((rows.loss, rows.params)))
    return CandidateSet(
        site.name,
        rows.forms,
        rows.dims,
        rows.params,
        rows.loss,
        rows.latency,
        rows.interpolated,
        rows.cached,
        rows.shared,
    )
