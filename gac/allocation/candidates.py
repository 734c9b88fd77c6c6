"""From loss curves and a latency table to the candidates of a site."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from gac.allocation.candidate_set import CandidateSet
from gac.allocation.combining import criteria_of, reduced
from gac.allocation.dims import full_dim
from gac.allocation.latencies import BF16, UNKNOWN, Timing
from gac.allocation.making import Making
from gac.allocation.options import side_by_side
from gac.allocation.rivals import Rivals
from gac.core.errors import PlanError, ProfileError
from gac.forms import DENSE, form_named
from gac.forms.loss_curves import LossCurves
from gac.models.sites import Site
from gac.plan.costs import columns_of
from gac.plan.recipe import Space
from gac.schemes import DEFAULT_SCHEME, SCHEMES, Scheme, scheme_named


def candidates(
    site: Site,
    curves: LossCurves,
    space: Space,
    timing: Timing,
    limited: Collection[str],
    needed: Collection[str] = (),
) -> CandidateSet:
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
        limited: the cost columns in which choices will be limited, or that are to be small.
        needed: those of them of which an unknown one rules a candidate out. These are left out before they are
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
    schemes, known = [scheme_named(name) for name in space.schemes], tuple(one for one in columns if one in needed)
    makings = [
        Making(layout, curves, space, together, timing, columns, known)
        for layout in site.fused_and_unfused
        for together in ([[one] for one in schemes] if layout.fused else [schemes])
    ]
    parts, rivals = list[CandidateSet](), Rivals()
    for making in reversed(makings):  # those that share a GEMM are few, and beat most of the others
        found = making.all(rivals)
        parts = [*found, *parts]
        rivals = rivals.joined_by(*(criteria_of(rows, columns) for rows in found))
    if not parts and known:
        return candidates(site, curves, space, timing, limited)
    if not parts:
        raise _nothing_allowed(site, space)
    rows = CandidateSet.joined(parts)
    if site.fusion_optional:
        rows = _fastest_first(rows, site, timing)
    if len(parts) > 1:
        rows = reduced(rows, columns)
    if DEFAULT_SCHEME in space.schemes:
        rows = _with_dense(rows, dense_candidate(site, timing))
    return rows.at(np.lexsort((rows.loss, rows.params)))


def dense_candidate(site: Site, timing: Timing, scheme: Scheme = BF16) -> CandidateSet:
    """The dense site as its only candidate: what a plan's costs are set beside.

    Where its weights may be fused or not, they are not: so the model runs that is compressed.
    """
    dense, dims = [DENSE] * len(site.weights), [full_dim(weight) for weight in site.weights]
    return side_by_side(site.fused_and_unfused[0], dense, dims, scheme, timing)


def candidate_at(site: Site, forms: Sequence[str], dims: Sequence[int], loss: float, timing: Timing) -> CandidateSet:
    """One form and dim a weight as the site's only candidate, with a loss that is known already.

    Where its weights may be fused or not, they are as is faster.
    """
    as_forms, as_dims = [form_named(name) for name in forms], [np.array([dim]) for dim in dims]
    scheme = scheme_named(DEFAULT_SCHEME)
    rows = CandidateSet.joined(
        [side_by_side(layout, as_forms, as_dims, scheme, timing) for layout in site.fused_and_unfused]
    )
    return replace(_fastest_first(rows, site, timing).at(slice(1)), loss=np.array([loss]))


def _nothing_allowed(site: Site, space: Space) -> PlanError:
    """What is said where the schemes that are asked for leave a weight of a site no dim."""
    forms = ", ".join((DENSE.name, *space.forms))
    shapes = ", ".join(f"{one.out_features} x {one.in_features}" for one in site.weights)
    needs = {
        name: scheme.shape_requirement for name in space.schemes if (scheme := scheme_named(name)).shape_requirement
    }
    able = [one.name for one in SCHEMES if one.shape_requirement is None and all(map(one.applies_to, site.weights))]
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


def _with_dense(rows: CandidateSet, dense: CandidateSet) -> CandidateSet:
    same = [(getattr(rows, name) == getattr(dense, name)).all(axis=1) for name in ("forms", "schemes", "dims")]
    found = np.logical_and.reduce([*same, rows.shared == dense.shared])
    return rows if found.any() else CandidateSet.joined([rows, dense])
