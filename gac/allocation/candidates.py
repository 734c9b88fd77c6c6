"""From loss curves and a latency table to the candidates of a site."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from math import lcm
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gac.allocation.latencies import BF16, UNKNOWN, Timing, sum_of_latencies
from gac.allocation.pareto import front, front_of_each_kind
from gac.arrays import Floats, Ints
from gac.costs import COSTS, PARAMS, columns_of
from gac.curves import LossCurve, LossCurves
from gac.errors import PlanError, ProfileError
from gac.forms import Form, form_named, variants_of
from gac.models.sites import Site, Weight
from gac.plan import Candidate
from gac.recipe import Space
from gac.schemes import DEFAULT_SCHEME, SCHEMES, Scheme, scheme_named

Numbers = TypeVar("Numbers", Floats, Ints)

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
        )

    def at(self, cut: slice | Ints | NDArray[np.bool_]) -> "CandidateSet":
        """Some of the candidates."""
        columns: dict[str, Any] = {name: getattr(self, name)[cut] for name in _ARRAYS}
        return replace(self, **columns)

    @classmethod
    def joined(cls, parts: Sequence["CandidateSet"]) -> "CandidateSet":
        """The candidates of one site, from several sets, one after the other."""
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        return replace(parts[0], **columns)


_ARRAYS = tuple(field.name for field in fields(CandidateSet))[2:]


def candidates(site: Site, curves: LossCurves, space: Space, timing: Timing, limited: Collection[str]) -> CandidateSet:
    """Every form, scheme and dim worth choosing for a site, sorted by parameters and then loss.

    Each weight may stay dense or take a form of its own at one of its dims; those that a form shortens together
    (``narrow``, ``head_dim``) may instead take one of its dims, the same for all, and some of them there a form that
    lies inside it (``narrow_pair``), at one of that form's dims. Where first GEMMs are fused, the
    latency is that of the one GEMM, at its own width, and of what is left of each weight; where they may be, candidates
    of both kinds compete. The combinations of several weights are reduced to those that no other one beats or equals in
    loss and in all that is limited, which loses no optimum as long as nothing else is; of two that are equal and run
    differently, the faster stays. The dense site always stays, where it may be stored as it was loaded.

    Args:
        curves: of the model.
        space: the forms besides dense, and the schemes; weights that share a GEMM have one scheme, and so do those that
            a form takes together. ``align`` keeps to dims that the profile shows to be sound for all workloads, and of
            those to the multiples of the number that is given (all of its multiples where there is no profile). Dims at
            which a scheme has no operator for a GEMM are left out.
        timing: where latencies are looked up.
        limited: the cost columns in which choices will be limited.

    Raises:
        ProfileError: ``align`` without a profile.
        PlanError: no scheme allows any dim of a weight; names those that do.
    """
    if space.align is True and timing.profile is None:
        raise ProfileError(
            "align=True without a profile",
            "a profile that shows which dims are sound",
            "Name a profile, a number to align to, or align=False.",
        )
    columns = tuple(column for column in columns_of(timing.workloads) if column in limited)
    schemes = [scheme_named(name) for name in space.schemes]
    parts: list[CandidateSet] = []
    for layout in site.layouts:
        # Weights that share a GEMM have one scheme.
        for together in [[scheme] for scheme in schemes] if layout.fused else [schemes]:
            parts += _Making(layout, curves, space, together, timing, columns).all()
    if not parts:
        raise _nothing_allowed(site, space)
    rows = CandidateSet.joined(parts)
    if site.either:
        rows = _fastest_first(rows, site, timing)
    if len(parts) > 1:
        rows = _reduced(rows, columns)
    if DEFAULT_SCHEME in space.schemes:
        rows = _with_dense(rows, dense_candidate(site, timing))
    return rows.at(np.lexsort((rows.loss, rows.params)))


def dense_candidate(site: Site, timing: Timing, scheme: Scheme = BF16) -> CandidateSet:
    """The dense site as its only candidate: what a plan's costs are set beside.

    Where its weights may be fused or not, they are not: so the model runs that is compressed.
    """
    dense, dims = [form_named("dense")] * len(site.weights), [_full(weight) for weight in site.weights]
    return _side_by_side(site.layouts[0], dense, dims, scheme, timing)


def candidate_at(site: Site, forms: Sequence[str], dims: Sequence[int], loss: float, timing: Timing) -> CandidateSet:
    """One form and dim a weight as the site's only candidate, with a loss that is known already.

    Where its weights may be fused or not, they are as is faster.
    """
    as_forms, as_dims = [form_named(name) for name in forms], [np.array([dim]) for dim in dims]
    scheme = scheme_named(DEFAULT_SCHEME)
    rows = CandidateSet.joined([_side_by_side(layout, as_forms, as_dims, scheme, timing) for layout in site.layouts])
    return replace(_fastest_first(rows, site, timing).at(slice(1)), loss=np.array([loss]))


@dataclass(frozen=True, eq=False)
class _Making:
    """What the candidates of a site are made from where it is known what is fused, and what will be limited."""

    site: Site
    curves: LossCurves
    space: Space
    schemes: Sequence[Scheme]
    timing: Timing
    limited: tuple[str, ...]

    @property
    def forms(self) -> list[Form]:
        return [form_named(name) for name in self.space.forms]

    def all(self) -> list[CandidateSet]:
        """All that the site may become."""
        own = [self._own(at) for at in range(len(self.site.weights))]
        found = self._combined(own)
        for form in self.forms:
            for scheme in self.schemes if (taken := self.site.taken_by(form)) else ():
                (key,) = (weight for weight in self.site.weights if form.shortens(weight) == "in")
                if curve := self.curves.of(form, key, scheme.name):
                    found += self._together(form, scheme, taken, curve, own)
        return found

    def _own(self, at: int) -> CandidateSet:
        """One weight's own choices."""
        weight, dense, options = self.site.weights[at], form_named("dense"), []
        for scheme in self.schemes:
            lost, dims = self.curves.of(dense, weight, scheme.name), self._allowed(dense, scheme, [at], _full(weight))
            options.append(_options(self.site, at, dense, scheme, dims, lost, self.timing))
            for form in (form for form in self.forms if form.takes(weight)):
                if not form.inside and not form.shortens(weight):
                    options += self._at_its_dims(form, scheme, at)
        return CandidateSet.joined(options)

    def _at_its_dims(self, form: Form, scheme: Scheme, at: int) -> list[CandidateSet]:
        """One weight in a form of its own; nothing where that was not measured."""
        weight = self.site.weights[at]
        if (curve := self.curves.of(form, weight, scheme.name)) is None:
            return []
        dims = self._dims(form, scheme, [at], form.largest_useful(weight))
        return [_options(self.site, at, form, scheme, dims, curve, self.timing)]

    def _together(
        self, form: Form, scheme: Scheme, taken: Sequence[int], curve: LossCurve, own: Sequence[CandidateSet]
    ) -> list[CandidateSet]:
        """One dim, below the full one, for all weights that a form takes together, beside the others' own choices."""
        dims, found = self._dims(form, scheme, taken, curve.full - 1), []
        inside = {at: self._inside(form, at) for at in taken}
        if len(taken) == len(own):  # where nothing lies inside, there is nothing to combine
            split = [one.shortening(1)[1] for forms in inside.values() for one in forms]
            whole, dims = dims[~np.isin(dims, split)], dims[np.isin(dims, split)]
            if len(whole):
                rows = _side_by_side(self.site, [form] * len(own), [whole] * len(own), scheme, self.timing)
                found.append(replace(rows, loss=curve.loss[whole]))
        for dim in dims.tolist():
            options = list(own)
            for at in taken:
                options[at] = self._shortened(form, scheme, at, dim, inside[at])
            found += [replace(rows, loss=rows.loss + curve.loss[dim]) for rows in self._combined(options)]
        return found

    def _inside(self, form: Form, at: int) -> list[Form]:
        """What a weight may have inside a form that takes it."""
        asked = (one for one in self.forms if one.inside == form.name)
        return list(variants_of(asked, self.site.weights[at]))

    def _shortened(self, form: Form, scheme: Scheme, at: int, dim: int, inside: Sequence[Form]) -> CandidateSet:
        """One weight at the dim of a form that takes it with others: as that form has it, or with one inside it."""
        options = [_options(self.site, at, form, scheme, np.array([dim]), None, self.timing)]
        for one in (one for one in inside if one.shortening(1)[1] == dim):
            options += self._at_its_dims(one, scheme, at)
        return CandidateSet.joined(options)

    def _combined(self, options: Sequence[CandidateSet]) -> list[CandidateSet]:
        """All combinations of the weights' choices, reduced before and after each; nothing where a weight has none."""
        if not all(map(len, options)):
            return []
        if len(options) > 1:
            options = [_reduced(own, self.limited) for own in options]
        rows = options[0]
        for at, own in enumerate(options):
            rows = _combined(rows, own, self.limited) if at else rows
            if self.site.fused and at == self.site.fused[-1]:
                rows = _reduced(_with_fused_gemm(rows, self.site, self.timing), self.limited)
        return [rows]

    def _allowed(self, form: Form, scheme: Scheme, taken: Sequence[int], dims: Ints) -> Ints:
        """Those of the dims at which the scheme has an operator for every GEMM of these weights."""
        weights = [self.site.weights[at] for at in taken]
        if not all(map(scheme.takes, weights)):
            return dims[:0]
        if scheme.needs is None:
            return dims
        gemms = [[one for weight in weights for one in form.gemms(weight, dim, 1)] for dim in dims.tolist()]
        return dims[np.array([all(map(scheme.runs, of_dim)) for of_dim in gemms], dtype=np.bool_)]

    def _dims(self, form: Form, scheme: Scheme, taken: Sequence[int], largest: int) -> Ints:
        """The dims up to the largest that the scheme allows; of those the aligned and sound ones where asked for."""
        first, step = first_dim(form, self.space.align), step_of(form, self.space.align)
        dims = np.arange(first, largest + 1, step, dtype=np.int64)
        if self.space.align and self.timing.profile is not None:
            for at in taken:
                weight, fused = self.site.weights[at], at in self.site.fused
                sound = partial(self.timing.sound, form, weight, dims, fused)
                dims = dims[self.timing.once(("sound", form.name, fused, dims.tobytes()), weight, sound)]
        return self._allowed(form, scheme, taken, dims)


def _nothing_allowed(site: Site, space: Space) -> PlanError:
    """What is said where the schemes that are asked for leave a weight of a site no dim."""
    forms = ", ".join(("dense", *space.forms))
    shapes = ", ".join(f"{one.out_features} x {one.in_features}" for one in site.weights)
    needs = {name: scheme.needs for name in space.schemes if (scheme := scheme_named(name)).needs}
    able = [one.name for one in SCHEMES if one.needs is None and all(map(one.takes, site.weights))]
    return PlanError(
        f"{site.kind} ({shapes}) in schemes {', '.join(space.schemes)}, which allow it no dim of {forms}",
        "; ".join(f"{wanted} for {name}" for name, wanted in needs.items()) or "schemes that take these weights",
        f"Add a scheme that takes any dim, such as {', '.join(able)}.",
    )


def _fastest_first(rows: CandidateSet, site: Site, timing: Timing) -> CandidateSet:
    """By the sum over the workloads of the latency over the dense site's, unknown ones last; else as they were."""
    dense = dense_candidate(site, timing).latency
    known = ((rows.latency != UNKNOWN) & (dense != UNKNOWN)).all(axis=1)
    return rows.at(np.argsort(np.where(known, (rows.latency / np.abs(dense)).sum(axis=1), np.inf), kind="stable"))


def _side_by_side(
    site: Site, forms: Sequence[Form], dims: Sequence[Ints], scheme: Scheme, timing: Timing
) -> CandidateSet:
    """Every weight in its form, each at its dims, row by row; no loss is looked up."""
    weights = enumerate(zip(forms, dims, strict=True))
    rows = reduce(_beside, [_options(site, at, form, scheme, ours, None, timing) for at, (form, ours) in weights])
    return _with_fused_gemm(rows, site, timing) if site.fused else rows


def step_of(form: Form, align: bool | int) -> int:
    """What the dims of a form are multiples of, whatever the profile says of them."""
    return lcm(form.step, int(align)) if align and not form.pieces else 1


def first_dim(form: Form, align: bool | int) -> int:
    """The smallest dim of a form, whatever the profile says of it."""
    return step_of(form, align) if form.least else 0


def _full(weight: Weight) -> Ints:
    return np.array([form_named("dense").full(weight)])


def _options(
    site: Site, at: int, form: Form, scheme: Scheme, dims: Ints, curve: LossCurve | None, timing: Timing
) -> CandidateSet:
    """One weight in one form and scheme at each of the dims."""
    weight, fused = site.weights[at], at in site.fused
    rows = timing.once(
        (form.name, scheme.name, fused, dims.tobytes()),
        weight,
        partial(_without_loss, weight, fused, form, scheme, dims, timing),
    )
    return replace(rows, site=site.name, loss=rows.loss if curve is None else curve.loss[dims])


def _without_loss(weight: Weight, fused: bool, form: Form, scheme: Scheme, dims: Ints, timing: Timing) -> CandidateSet:
    """What one weight takes in one form and scheme at each of the dims; no loss is looked up."""
    count = len(dims)
    latency, measured = (timing.after_fused if fused else timing.of_weight)(form, weight, dims, scheme)
    counted = [[cost(form, scheme, weight, dim) for cost in COSTS.values()] for dim in dims.tolist()]
    return CandidateSet(
        weight.name,
        columns_of(timing.workloads),
        forms=np.full((count, 1), form.name),
        schemes=np.full((count, 1), scheme.name),
        dims=dims[:, None],
        loss=np.zeros(count),
        costs=np.concatenate([np.array(counted, dtype=np.int64).reshape(count, len(COSTS)), latency], axis=1),
        interpolated=((latency != UNKNOWN) & ~measured).astype(np.int64),
        width=timing.joined(form, weight, dims) if fused else np.zeros_like(latency),
        shared=np.full(count, fused),
    )


def _with_fused_gemm(rows: CandidateSet, site: Site, timing: Timing) -> CandidateSet:
    """The same rows with the latency of the GEMM that their weights share, which is then accounted for."""
    first, costs = site.fused[0], rows.costs.copy()
    scheme = scheme_named(str(rows.schemes[0, first]))
    latency, measured = timing.of_fused(site.weights[first].in_features, rows.width, scheme)
    costs[:, len(COSTS) :] = sum_of_latencies(rows.latency, latency)
    interpolated = rows.interpolated + ((latency != UNKNOWN) & ~measured)
    return replace(rows, costs=costs, interpolated=interpolated, width=np.zeros_like(rows.width))


def _beside(left: CandidateSet, right: CandidateSet) -> CandidateSet:
    """Row by row, the choices of the left weights with those of the right ones."""
    pairs = {name: (getattr(left, name), getattr(right, name)) for name in _ARRAYS}
    columns: dict[str, Any] = {name: np.concatenate(pairs[name], axis=1) for name in ("forms", "schemes", "dims")}
    columns |= {name: np.add(*pairs[name]) for name in ("loss", "interpolated", "width")}
    return replace(left, **columns, costs=sum_of_latencies(*pairs["costs"]), shared=left.shared | right.shared)


def _combined(left: CandidateSet, right: CandidateSet, limited: Sequence[str]) -> CandidateSet:
    """Every left row beside every right row, reduced; in batches of left rows, so that memory stays bounded."""
    width = max(1, _BATCH // len(right))
    parts = []
    for start in range(0, len(left), width):
        part = left.at(slice(start, start + width))
        criteria = _pair_sums(_criteria(part, limited), _criteria(right, limited))
        widths = _pair_sums(_limited_widths(part, limited), _limited_widths(right, limited))
        kept = np.flatnonzero(_front(criteria, widths))
        at_left, at_right = np.divmod(kept, len(right))
        parts.append(_beside(part.at(at_left), right.at(at_right)))
    return parts[0] if len(parts) == 1 else _reduced(CandidateSet.joined(parts), limited)


def _pair_sums(left: Numbers, right: Numbers) -> Numbers:
    """Every left row with every right row added to it, left rows outermost."""
    sums: Numbers = (left[:, None, :] + right[None, :, :]).reshape(len(left) * len(right), left.shape[1])
    return sums


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
    return front_of_each_kind(criteria, widths) if widths.any() else front(criteria)


def _with_dense(rows: CandidateSet, dense: CandidateSet) -> CandidateSet:
    same = [(getattr(rows, name) == getattr(dense, name)).all(axis=1) for name in ("forms", "schemes", "dims")]
    found = np.logical_and.reduce([*same, rows.shared == dense.shared])
    return rows if found.any() else CandidateSet.joined([rows, dense])
