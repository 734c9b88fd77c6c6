"""From loss curves and a latency table to the Pareto-optimal candidates of a site."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import product

import numpy as np

from gac.allocation.candidate_set import (
    CandidateSet,
    criteria_of,
    cross_product,
    cross_product_fused,
    pareto_optimal,
)
from gac.allocation.dims import allowed_dims, full_dim, runnable_dims, takes_any_dim, unread_reason
from gac.allocation.latencies import (
    BF16,
    INTERPOLATED,
    MODELLED,
    UNKNOWN,
    Timing,
    add,
    attention_latency,
    sum_of_latencies,
)
from gac.allocation.pareto import ParetoSet
from gac.core.arrays import Ints
from gac.core.errors import PlanError, ProfileError
from gac.forms import Form, form_named, variants_of
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.models.sites import Site
from gac.plan.costs import COSTS, columns_of
from gac.plan.engines import Engine
from gac.plan.recipe import Space
from gac.schemes import DEFAULT_SCHEME, SCHEMES, Scheme, scheme_named, scheme_of


def candidates(
    site: Site, curves: LossCurves, space: Space, timing: Timing, limited: Collection[str], needed: Collection[str] = ()
) -> CandidateSet:
    """Return the Pareto-optimal forms, schemes and dims of a site, sorted by parameters and then loss.

    Each weight may stay dense or take a form at one of its dims; weights that a form shortens together (``narrow``,
    ``head_dim``) may instead take one of its dims, the same for all, and some of them a form inside it
    (``narrow_pair``). Where first GEMMs are fused, the latency is that of the one GEMM and of the rest of each weight;
    where fusing is optional, candidates of both kinds compete. Combinations that others dominate or equal in loss and
    in the limited columns are left out, which loses no optimum as long as nothing else is limited; of two that are
    equal and run differently, the faster stays. The dense site always stays, where it may be stored as it was loaded.

    Args:
        curves: of the model.
        space: weights that share a GEMM have one scheme, and so do those that a form shortens together. ``align`` keeps
            to dims that the profile shows to be sound for all workloads, and of those to multiples of the number.
        timing: source of latencies.
        limited: the cost columns that will be limited or minimised.
        needed: those of them that must be known. Candidates of unknown cost are dropped before they are
            combined; the dense site stays, and all stay where nothing else does.

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
    schemes, required = [*map(scheme_named, space.schemes)], tuple(name for name in columns if name in needed)
    builders = [
        CandidateBuilder(layout, curves, space, group, timing, columns, required)
        for layout in site.fused_and_unfused
        for group in ([[scheme] for scheme in schemes] if layout.fused else [schemes])
    ]
    parts, known = list[CandidateSet](), ParetoSet()
    for builder in reversed(builders):  # those that share a GEMM are few, and dominate most of the others
        built = builder.build(known)
        parts = [*built, *parts]
        known = known.extend(*(criteria_of(rows, columns) for rows in built))
    if not parts and required:
        return candidates(site, curves, space, timing, limited)
    if not parts:
        raise _nothing_allowed(site, space, timing.engine)
    rows = CandidateSet.concatenate(parts)
    if site.fusion_optional:
        rows = _fastest_first(rows, site, timing)
    if len(parts) > 1:
        rows = pareto_optimal(rows, columns)
    if DEFAULT_SCHEME in space.schemes:
        rows = _with_dense(rows, dense_candidate(site, timing))
    return rows.pick(np.lexsort((rows.loss, rows.params)))


def dense_candidate(site: Site, timing: Timing, scheme: Scheme = BF16) -> CandidateSet:
    """Return the dense site; weights that may share a GEMM do so, as in engines, where the profile has it.

    A workload that the profile lacks either way changes nothing for the others.
    """
    dense, dims = [form_named("dense")] * len(site.weights), [full_dim(weight) for weight in site.weights]
    layouts = [zip_candidates(layout, dense, dims, scheme, timing) for layout in site.fused_and_unfused]
    return max(reversed(layouts), key=lambda rows: int((rows.latency != UNKNOWN).sum()))


def candidate_at(site: Site, forms: Sequence[str], dims: Sequence[int], loss: float, timing: Timing) -> CandidateSet:
    """Return one form and dim a weight as the site's only candidate, fused where that is optional and faster."""
    as_forms, as_dims = [form_named(name) for name in forms], [np.array([dim]) for dim in dims]
    scheme = scheme_named(DEFAULT_SCHEME)
    layouts = [zip_candidates(layout, as_forms, as_dims, scheme, timing) for layout in site.fused_and_unfused]
    fastest = _fastest_first(CandidateSet.concatenate(layouts), site, timing).pick(slice(1))
    return replace(fastest, loss=np.array([loss]))


def _nothing_allowed(site: Site, space: Space, engine: Engine) -> PlanError:
    shapes = ", ".join(f"{weight.out_features} x {weight.in_features}" for weight in site.weights)
    stated = f"no allowed dim of {', '.join(('dense', *space.forms))} for {site.kind} ({shapes})"
    schemes, dense = map(scheme_named, space.schemes), form_named("dense")
    needs = []
    for scheme in schemes:
        unread = (unread_reason(dense, scheme, weight, dense.full(weight), engine) for weight in site.weights)
        if scheme.shape_requirement:
            needs.append(f"{scheme.shape_requirement} for {scheme.name}")
        elif reason := next(filter(None, unread), None):
            needs.append(f"weights for the kernels of {scheme.name} ({reason})")
    free = [scheme for scheme in SCHEMES if takes_any_dim(scheme, engine)]
    able = [scheme.name for scheme in free if all(map(scheme.applies_to, site.weights))]
    return PlanError(
        f"{stated} in schemes {', '.join(space.schemes)}",
        "; ".join(needs) or "schemes that take these weights",
        f"Add a scheme that takes any dim, such as {', '.join(able)}.",
    )


def _fastest_first(rows: CandidateSet, site: Site, timing: Timing) -> CandidateSet:
    """Stably sorted by the sum over known workloads of the latency over the dense site's, most known ones first."""
    dense = dense_candidate(site, timing).latency
    known = (rows.latency != UNKNOWN) & (dense != UNKNOWN)
    return rows.pick(np.lexsort(((known * rows.latency / np.abs(dense)).sum(axis=1), -known.sum(axis=1))))


def _with_dense(rows: CandidateSet, dense: CandidateSet) -> CandidateSet:
    same = [(getattr(rows, name) == getattr(dense, name)).all(axis=1) for name in ("forms", "schemes", "dims")]
    present = np.logical_and.reduce([*same, rows.shared == dense.shared])
    return rows if present.any() else CandidateSet.concatenate([rows, dense])


@dataclass(frozen=True, eq=False)
class CandidateBuilder:
    """Build all candidates of a site for one fusion choice; several schemes where no weights share a GEMM."""

    site: Site
    curves: LossCurves
    space: Space
    schemes: Sequence[Scheme]
    timing: Timing
    limited: tuple[str, ...]
    needed: tuple[str, ...] = ()

    @property
    def forms(self) -> list[Form]:
        return [form_named(name) for name in self.space.forms]

    def build(self, known: ParetoSet) -> list[CandidateSet]:
        """Return all candidates but dominated ones; combinations of separate choices come last, as few of them stay."""
        separate = [self._separate(position) for position in range(len(self.site.weights))]
        built: list[CandidateSet] = []
        for named in self.forms:
            taken = self.site.joint_weights(named)
            for form, scheme in product(named.variants(self.site.weights[taken[-1]]), self.schemes) if taken else ():
                built += self._shortened_together(form, scheme, taken, separate, known)
        known = known.extend(*(criteria_of(rows, self.limited) for rows in built))
        return [*self._combined(separate, known), *built]

    def _separate(self, position: int) -> CandidateSet:
        weight, dense, options = self.site.weights[position], form_named("dense"), []
        for scheme in dict.fromkeys(scheme_of(scheme, weight) for scheme in self.schemes):
            curve = self.curves.of(dense, weight, scheme.name)
            dims = runnable_dims(dense, scheme, weight, full_dim(weight), self.timing.gpus, self.timing.engine)
            options.append(weight_candidates(self.site, position, dense, scheme, dims, curve, self.timing))
            for form in (form for form in self.forms if form.applies_to(weight)):
                if not form.parent_form_name and not form.shortens(weight):
                    options += self._in_form(form, scheme, position)
        return CandidateSet.concatenate(options)

    def _in_form(self, form: Form, scheme: Scheme, position: int) -> list[CandidateSet]:
        weight = self.site.weights[position]
        if (curve := self.curves.of(form, weight, scheme.name)) is None:
            return []
        largest, align = form.max_useful_dim(weight), self.space.align
        dims = allowed_dims(largest, self.site, form, scheme, [position], align, self.timing)
        return [weight_candidates(self.site, position, form, scheme, dims, curve, self.timing)]

    def _shortened_together(
        self, form: Form, scheme: Scheme, taken: Sequence[int], separate: Sequence[CandidateSet], known: ParetoSet
    ) -> list[CandidateSet]:
        """One dim, below the full one, for all weights that a form shortens, with the other weights' choices."""
        (key,) = (weight for weight in self.site.weights if form.shortens(weight) == "in")
        if (curve := self.curves.of(form, key, scheme.name)) is None:
            return []
        # The full dim may be smaller than the dense weight, and is then a choice too.
        largest = curve.full - int(form.params(key, curve.full) == key.params)
        dims = allowed_dims(largest, self.site, form, scheme, taken, self.space.align, self.timing)
        built = list[CandidateSet]()
        children = [other for other in self.forms if other.parent_form_name == form.name]
        inside = {position: [*variants_of(children, self.site.weights[position])] for position in taken}
        if len(taken) == len(separate):  # at dims without a form inside there is nothing to combine
            split = [variant.shortening(1)[1] for variants in inside.values() for variant in variants]
            plain, dims = dims[~np.isin(dims, split)], dims[np.isin(dims, split)]
            if len(plain):
                count = len(separate)
                rows = zip_candidates(self.site, [form] * count, [plain] * count, scheme, self.timing)
                rows = self._possible(replace(rows, loss=curve.loss[plain]))
                built += [rows] if len(rows) else []
        for dim in dims.tolist():
            options = list(separate)
            for position in taken:
                applied = scheme_of(scheme, self.site.weights[position])
                parts = [weight_candidates(self.site, position, form, applied, np.array([dim]), None, self.timing)]
                for variant in inside[position]:
                    if variant.shortening(1)[1] == dim:
                        parts += self._in_form(variant, scheme, position)
                options[position] = CandidateSet.concatenate(parts)
            built += self._combined(options, known, float(curve.loss[dim]))
        return built

    def _combined(self, options: Sequence[CandidateSet], known: ParetoSet, extra: float = 0.0) -> list[CandidateSet]:
        options = [self._possible(rows) for rows in options]
        if not all(map(len, options)):
            return []
        if len(options) > 1:
            options = [pareto_optimal(rows, self.limited) for rows in options]
        if count := len(self.site.fused):
            first = self.site.weights[self.site.fused[0]]
            gemm = partial(self.timing.of_shared, first, scheme=self.schemes[0])
            fused = cross_product_fused(options[:count], self.limited, gemm)
            fused = self._possible(with_fused_gemm(fused, self.site, self.timing))
            options = [pareto_optimal(fused, self.limited), *options[count:]]
        rows = cross_product(options, self.limited, known, extra) if len(options[0]) else None
        return [] if rows is None else [rows]

    def _possible(self, rows: CandidateSet) -> CandidateSet:
        return rows.pick(rows.known(self.needed)) if self.needed else rows


# --- of one weight, and of the GEMM that several share ---------------------------------------------------------------


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
    schemes = [scheme_of(scheme, weight) for weight in site.weights]
    weights = enumerate(zip(forms, schemes, dims, strict=True))
    rows = reduce(
        CandidateSet.paired,
        [weight_candidates(site, index, form, applied, at, None, timing) for index, (form, applied, at) in weights],
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
