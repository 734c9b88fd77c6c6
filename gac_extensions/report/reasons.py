"""Reasons for the size of a site: the plan's alternatives and prices, and the latency table."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from gac.allocation.dims import runnable_dims, step_of
from gac.allocation.latencies import DTYPE, UNKNOWN, Timing
from gac.core.words import duration, nats, number_of
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.plan.costs import COSTS, Cost, ns_of
from gac.plan.engines import ENGINES, TRANSFORMERS
from gac.plan.layers import choices
from gac.plan.plan import Candidate, Plan, SiteChoice, WeightChoice, counted
from gac.plan.summary import rule_of
from gac.profiling.cliffs import operator_period
from gac.profiling.table import Profile
from gac.schemes import scheme_named

_REACH = 256


@dataclass(frozen=True)
class Trade:
    choice: str  # the alternative in words
    freed: int  # parameters that it uses less (bytes, where these are limited); negative: more
    lost: float  # nats a token that it loses more; negative: less
    worth: float  # the value of all that it uses less at the prices of the certificate, in nats a token
    slower: tuple[tuple[str, int], ...]  # ns that it takes more, by limited workload, where known
    cached: tuple[tuple[Cost, int], ...]  # the limited costs of the KV cache, with the amount that it uses less


def trades(plan: Plan, site: SiteChoice) -> tuple[Trade, ...]:
    """One for each of the site's alternatives, the smaller one first."""
    return tuple(_trade(plan, site, other) for other in site.alternatives)


def _trade(plan: Plan, site: SiteChoice, other: Candidate) -> Trade:
    theirs = other.choices([choice.weight for choice in site.weights])
    more: dict[str, int | None] = {}
    for column in (limit.column for limit in plan.limits):
        if column in COSTS:
            more[column] = counted(theirs, column)[0] - counted(site.weights, column)[0]
        else:
            number = [ns_of(timed.workload) for timed in plan.workloads].index(column)
            before, after = site.latency_ns[number], other.latency_ns[number]
            more[column] = None if before is None or after is None else after - before
    latencies = ((column.removeprefix("ns:"), ns) for column, ns in more.items() if column.startswith("ns:"))
    return Trade(
        choices(theirs),
        counted(site.weights, plan.size.column)[0] - counted(theirs, plan.size.column)[0],
        other.loss - site.loss,
        sum(price * -(used or 0) for price, used in zip(plan.prices, more.values(), strict=True)),
        tuple((workload, ns) for workload, ns in latencies if ns is not None),
        tuple((cost, -(more.get(name) or 0)) for name, cost in COSTS.items() if not cost.of_weights),
    )


def nearest_smaller(plan: Plan, site: SiteChoice) -> Trade | None:
    return next((trade for trade in trades(plan, site) if trade.freed > 0), None)


def reasons(plan: Plan, site: SiteChoice) -> tuple[str, ...]:
    """Sentences: why no smaller candidate, why no larger one."""
    if rule := rule_of(plan):
        return (f"The rule {rule} gave this; it weighs no other choice.",)
    weighed = trades(plan, site)
    if not weighed:
        return (no_alternatives_reason(plan),)
    dense = all(weight.form == "dense" for weight in site.weights)
    largest = "Dense is the largest there is." if dense else "No candidate is larger."
    smaller = ["No candidate is smaller."] if weighed[0].freed < 0 else []
    larger = [largest] if weighed[-1].freed > 0 else []
    return (*smaller, *(_weighed(plan, trade) for trade in weighed), *larger)


def no_alternatives_reason(plan: Plan) -> str:
    if any(site.alternatives for site in plan.sites):
        return "None of the plan's forms gives this site another candidate."
    if plan.speed is not None:
        return "Loss did not limit this choice of speed, so nothing has a price in it."
    return "The plan does not hold what its sites could have had instead; gac allocate writes that now."


def _weighed(plan: Plan, trade: Trade) -> str:
    parts = [f"{duration(abs(ns))} {'slower' if ns > 0 else 'faster'} at {name}" for name, ns in trade.slower if ns]
    parts += [
        f"{abs(saved):,} {cost.unit} {'less' if saved > 0 else 'more'} in the {cost.label}"
        for cost, saved in trade.cached
        if saved
    ]
    changes = "".join(f", {part}" for part in parts)
    lost = f"lose {nats(abs(trade.lost))} nats a token {'more' if trade.lost >= 0 else 'less'}"
    noun = size_noun(plan)
    if trade.freed > 0:
        freed = number_of(trade.freed, noun)
        offer = f"Why not smaller: {trade.choice} would free {freed}{changes} and {lost}."
        if not any(plan.prices):
            return f"{offer} No limit binds, so nothing would be won with what is freed."
        near = "no less than it loses, yet no choice elsewhere was found that uses it"
        verdict = "less than it loses" if trade.worth < trade.lost else near
        return f"{offer} Spent elsewhere, that is worth {nats(trade.worth)}: {verdict}."
    near = "no more than it wins, yet the limits leave no room for it"
    verdict = "more than it wins" if -trade.worth > -trade.lost else near
    taken = number_of(-trade.freed, noun)
    left = plan.size.limit - plan.size.used
    return (
        f"Why not larger: {trade.choice} would take {taken} more{changes} and {lost}. "
        f"Elsewhere, that is worth {nats(0.0 - trade.worth)}: {verdict}."
        f"{'' if -trade.freed <= left else f' The limit has {left:,} left.'}"
    )


def size_noun(plan: Plan) -> str:
    """The unit of sizes: ``parameter``, or ``byte`` where these are limited."""
    return COSTS[plan.size.column].unit.removesuffix("s")


def next_dims(plan: Plan, profile: Profile | None, weight: WeightChoice, *, shared: bool) -> tuple[str, ...]:
    """One sentence a workload: latency at the dim, at the next dim, and at the next sound one.

    There is none for a weight that is dense, or that is not run.

    Args:
        profile: the one that the plan names; None: it is not at hand.
        shared: weights of its site run their first GEMMs as one.
    """
    form, scheme, dim = form_named(weight.form), scheme_named(weight.scheme), weight.dim
    runs = form.latency.axis(weight.weight) is not None and form.params(weight.weight, dim)
    if not runs or dim >= form.full(weight.weight):
        return ()
    gpus = plan.recipe.deployment.tensor_parallel
    if profile is None or shared or gpus > 1:
        split = f"weights are split over {gpus} GPUs" if gpus > 1 else "weights of this site share a GEMM"
        why = "the profile is not at hand" if profile is None else split
        return (f"What the next dim takes is not told: {why}.",)
    workloads = tuple(Workload.parse(timed.workload) for timed in plan.workloads)
    timing = Timing(profile, workloads, engine=ENGINES[plan.recipe.deployment.engine or TRANSFORMERS.name])
    if weight.weight.is_routed and not timing.times_experts:
        return ("The latency table holds no routed experts.",)
    after = np.arange(dim + 1, min(form.full(weight.weight), dim + _REACH) + 1)
    after = after[timing.sound(form, weight.weight, after, fused=False, scheme=scheme)]
    sound = runnable_dims(form, scheme, weight.weight, after, engine=timing.engine).tolist()
    dims = [dim, dim + 1, *sound[:1]]
    latency, _ = timing.of_weight(form, weight.weight, np.array(dims), scheme)
    broken = ""
    if dim + 1 not in sound[:1]:
        operator = form.latency.operation(weight.weight, 1, 1).operator
        periods = (operator_period(profile, operator, dtype) for dtype in (DTYPE, scheme.dtype))
        step = lcm(step_of(form, plan.recipe.space.align), *periods)
        slower = "a larger dim is faster" if dim + 1 in after else f"{scheme.name} needs {scheme.shape_requirement}"
        broken = f"no multiple of {step}" if (dim + 1) % step else slower
    return tuple(
        f"On the GPU, {workload}: {_timed(list(zip(dims, latency[:, column].tolist(), strict=True)), broken)}."
        for column, workload in enumerate(workloads)
    )


def _timed(known: Sequence[tuple[int, int]], broken: str) -> str:
    """The latencies in words: dim and ns of the chosen dim, the next one, and the next sound one where there is one.

    ``broken`` is the reason why the next dim is not sound; empty where it is.
    """
    (dim, ours), (following, theirs), *sound = known
    if all(ns == UNKNOWN for _, ns in known):
        return f"the latency table holds no time of {dim:,} or of the next dims"
    notes = [f"{theirs / ours:.2f}x"] if UNKNOWN not in (ours, theirs) else []
    notes += [broken] if broken else []
    words = f"{dim:,} takes {_time(ours)}; the next dim, {following:,}, {_time(theirs)}"
    words += f" ({', '.join(notes)})" if notes else ""
    if broken:
        words += "".join(f"; the next sound one, {dim:,}, {_time(ns)}" for dim, ns in sound) or "; no sound one follows"
    return words


def _time(ns: int) -> str:
    return "an unknown time" if ns == UNKNOWN else duration(ns)
