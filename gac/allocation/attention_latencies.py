"""What attention takes when it decodes, counted with the two weights of which the cache keeps something.

Each of k_proj and v_proj counts half of it. Over latents a table has attention along the rank of either, beside latents
of one rank that stand for the other's: what a weight counts is that, less half of what two of that rank take.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from gac.allocation.latencies import DTYPE, MEASURED, UNKNOWN, Known, Timing, look_up
from gac.core.arrays import Ints
from gac.core.operations import Operation
from gac.core.workloads import Workload
from gac.forms import DENSE, Form, form_named
from gac.models.sites import Site, Weight
from gac.plan.plan import WeightChoice
from gac.profiling.table import Profile


def of_attention(timing: Timing, form: Form, weight: Weight, dims: Ints) -> Known:
    """What a weight counts of attention at each of the dims.

    Nothing where the table lacks attention over a dense cache of that context, for forms that leave it dense; for
    prompts, which are attended to as they are; and on several GPUs. Where a dim makes the cache smaller without an
    operation of its own, it takes the share that is left.
    """
    latency = np.zeros((len(dims), len(timing.workloads)), dtype=np.int64)
    how = np.full(latency.shape, MEASURED, dtype=np.int64)
    if timing.profile is None or not weight.query_heads or timing.gpus > 1 or len(dims) == 0:
        return latency, how
    for column, workload in enumerate(timing.workloads):
        if workload.phase == "prefill":
            continue
        if (axis := form.cache.axis(weight)) is not None:
            operation = form.cache.attention(weight, int(dims[0]), workload.batch, workload.tokens)
            latency[:, column], how[:, column] = _of_latents(
                timing.profile, operation, axis, form.cache.assumed_partner_dim(weight), dims
            )
        elif (dense := _dense(timing.profile, weight, workload)) is not None:
            kept = np.array([form.cache.numbers(weight, dim) for dim in dims.tolist()], dtype=np.int64)
            latency[:, column] = -(-dense * kept // (2 * weight.cached_numbers))
    return latency, how


def counted(timing: Timing, choices: Iterable[WeightChoice], workload: str) -> int:
    """ns of attention that all of these choices count at a workload."""
    column = [str(one) for one in timing.workloads].index(workload)
    rows = (of_attention(timing, form_named(one.form), one.weight, np.array([one.dim]))[0] for one in choices)
    return sum(int(latency[0, column]) for latency in rows)


def knows(timing: Timing, form: Form, sites: Iterable[Site]) -> bool:
    """Whether latencies of a form can be known: tables have its operation, or its attention beside the dense one."""
    weights = (weight for site in sites for weight in site.weights)
    return form.latency.timed or all(
        timing.once((one.name, "attention"), weight, partial(_knows, timing, one, weight))
        for weight in weights
        for one in form.variants(weight)
        if one.applies_to(weight)
    )


def _knows(timing: Timing, form: Form, weight: Weight) -> bool:
    if form.cache.axis(weight) is None or timing.profile is None or not weight.query_heads or timing.gpus > 1:
        return False
    decoding = [one for one in timing.workloads if one.phase == "decode"]
    known = of_attention(timing, form, weight, np.array([form.cache.assumed_partner_dim(weight)]))[0] != UNKNOWN
    return bool(known.all()) and all(_dense(timing.profile, weight, one) is not None for one in decoding)


def _dense(profile: Profile, weight: Weight, workload: Workload) -> int | None:
    return profile.point(DENSE.cache.attention(weight, 1, workload.batch, workload.tokens), DTYPE)


def _of_latents(profile: Profile, operation: Operation, axis: str, beside: int, dims: Ints) -> tuple[Ints, Ints]:
    both = profile.point(replace(operation, shape=tuple((operation.axes | {axis: beside}).items())), DTYPE)
    known, how = look_up(profile, operation, axis, dims, DTYPE)
    if both is None:
        return np.full(len(dims), UNKNOWN, dtype=np.int64), how
    return np.where(known == UNKNOWN, UNKNOWN, np.maximum(known - both // 2, 1)), how
