"""What weights take in one form and scheme at each of some dims: the rows that candidates are made of."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

import numpy as np

from gac.allocation.attention_latencies import of_attention
from gac.allocation.candidate_set import CandidateSet
from gac.allocation.latencies import INTERPOLATED, MODELLED, UNKNOWN, Known, Timing, sum_of_latencies
from gac.core.arrays import Ints
from gac.forms import Form
from gac.forms.loss_curves import LossCurve
from gac.models.sites import Site, Weight
from gac.plan.costs import COSTS, columns_of
from gac.schemes import Scheme, scheme_named


def options_of(
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


def side_by_side(
    site: Site, forms: Sequence[Form], dims: Sequence[Ints], scheme: Scheme, timing: Timing
) -> CandidateSet:
    """Every weight in its form, each at its dims, row by row; no loss is looked up."""
    weights = enumerate(zip(forms, dims, strict=True))
    rows = reduce(
        CandidateSet.beside, [options_of(site, at, form, scheme, ours, None, timing) for at, (form, ours) in weights]
    )
    return with_fused_gemm(rows, site, timing) if site.fused else rows


def with_fused_gemm(rows: CandidateSet, site: Site, timing: Timing) -> CandidateSet:
    """The same rows with the latency of what their weights run together, which is then accounted for."""
    scheme, costs = scheme_named(str(rows.schemes[0, site.fused[0]])), rows.costs.copy()
    latency, how = of_what_is_shared(site, rows.width, scheme, timing)
    costs[:, len(COSTS) :] = sum_of_latencies(rows.latency, latency)
    uncounted = rows.interpolated + rows.modelled < rows.dims.shape[1]  # no weight counts twice
    counts = {name: getattr(rows, name) + ones * uncounted for name, ones in _counted(latency, how).items()}
    return replace(rows, costs=costs, **counts, width=np.zeros_like(rows.width))


def of_what_is_shared(site: Site, widths: Ints, scheme: Scheme, timing: Timing) -> Known:
    """The latency of what weights of the site run together, at each of its widths, and how it is known."""
    return timing.of_shared(site.weights[site.fused[0]], widths, scheme)


def _counted(latency: Ints, how: Ints) -> dict[str, Ints]:
    """1 where a latency is known and was interpolated, and where it was modelled."""
    known = latency != UNKNOWN
    kinds = {"interpolated": INTERPOLATED, "modelled": MODELLED}
    return {name: (known & (how == kind)).astype(np.int64) for name, kind in kinds.items()}


def _without_loss(weight: Weight, fused: bool, form: Form, scheme: Scheme, dims: Ints, timing: Timing) -> CandidateSet:
    """What one weight takes in one form and scheme at each of the dims; no loss is looked up."""
    count = len(dims)
    latency, how = (timing.after_fused if fused else timing.of_weight)(form, weight, dims, scheme)
    attention, known = of_attention(timing, form, weight, dims)
    latency, how = sum_of_latencies(latency, attention), np.maximum(how, known)
    counted = [[cost.of_choice(form, scheme, weight, dim) for cost in COSTS.values()] for dim in dims.tolist()]
    return CandidateSet(
        weight.name,
        columns_of(timing.workloads),
        forms=np.full((count, 1), form.name),
        schemes=np.full((count, 1), scheme.name),
        dims=dims[:, None],
        loss=np.zeros(count),
        costs=np.concatenate([np.array(counted, dtype=np.int64).reshape(count, len(COSTS)), latency], axis=1),
        **_counted(latency, how),
        width=timing.joined(form, weight, dims) if fused else timing.none_joined(count),
        shared=np.full(count, fused),
    )
