"""The plan in words: its tiles, its proof, its origin, and the commands that make it again."""

from collections.abc import Iterator
from shlex import quote

from gac.core.version import __version__
from gac.core.words import duration, megabytes, nats
from gac.plan.costs import COSTS
from gac.plan.layers import lossy_schemes
from gac.plan.plan import Limit, Plan, WorkloadLatency
from gac.plan.summary import (
    FUSED,
    allocate_command,
    apply_commands,
    fusion,
    how_known,
    lacking,
    modelled,
    over_fused,
    rule_of,
)
from gac.profiling.folders import saved_profiles, shipped_profiles
from gac.profiling.table import Profile
from gac.reporting.report.sources import Sources

Pairs = list[tuple[str, str]]


def tiles(plan: Plan) -> list[tuple[str, str, str]]:
    """The headline figures: name, value, and what it compares with."""
    budget, prediction, proof = plan.budget, plan.prediction, plan.certificate
    (used, total), (model, dense), (bits, of_model) = plan.bytes, plan.model_bytes, plan.bits
    return [
        ("Parameters kept", f"{budget.kept:.4f}", f"{budget.asked:g} asked"),
        ("Targeted weights", megabytes(used), f"{megabytes(total)} dense; {bits:.2f} bits each"),
        ("Whole model", megabytes(model), f"{megabytes(dense)} dense; {of_model:.2f} bits each"),
        ("Predicted perplexity", f"{prediction.perplexity:,.2f}", f"{prediction.dense_perplexity:,.2f} dense"),
        *(_time_tile(plan, timed) for timed in plan.workloads),
        ("Proof", proof.status, f"gap {proof.gap:.3g}"),
    ]


def _time_tile(plan: Plan, timed: WorkloadLatency) -> tuple[str, str, str]:
    if not timed.dense_ns or not timed.plan_ns:
        return timed.workload, "unknown", f"the table {lacking(timed, lossy_schemes(plan))}"
    ratio = over_fused(timed)
    fused = "" if ratio is None else f"; {ratio:.3f}x of {duration(timed.fused_ns)} {FUSED}"
    return timed.workload, f"{timed.plan_ns / timed.dense_ns:.3f}x", f"{duration(timed.dense_ns)} dense{fused}"


# --- the proof ------------------------------------------------------------------------------------------------------


def certificate(plan: Plan) -> Pairs:
    """Name and value pairs: the proof, each limit with the price of its units, and the proof of speed."""
    proof, rule = plan.certificate, rule_of(plan)
    prices = plan.prices if any(site.alternatives for site in plan.sites) else proof.multipliers
    limits = zip(plan.limits, prices, strict=True)
    share = f" ({proof.gap / proof.value:.1%} of its loss)" if proof.value > 0 else ""
    words = f"at most {nats(proof.gap)} nats a token{share} from the best choice"
    if proof.status == "optimal":
        words = "within the limits, no choice of the candidates loses less"
    elif rule:
        words = f"the rule {rule} made the choice, {words} with as many parameters"
    return [
        ("Status", f"{proof.status}: {words}"),
        ("Loss of the choice" if plan.speed is None else "Least loss", f"{proof.value:.6g} nats a token"),
        ("No choice loses less than", f"{proof.lower_bound:.6g} nats a token"),
        ("Gap", f"{proof.gap:.3g} nats a token{share if proof.gap else ''}"),
        *(pair for limit, price in limits for pair in _limit(limit, price)),
        ("Found by", proof.method),
        *_fastest(plan),
    ]


def _limit(limit: Limit, price: float) -> Iterator[tuple[str, str]]:
    workload = limit.column.removeprefix("ns:")
    if cost := COSTS.get(limit.column):
        label, (words, unit), amounts = cost.label, cost.priced, [f"{n:,}" for n in (limit.limit, limit.total)]
    else:
        label, words, unit = f"latency, {workload}", f"a microsecond at {workload}", 1e3
        amounts = [duration(ns) for ns in (limit.limit, limit.total)]
    room = duration if cost is None else "{:,}".format
    rest = f"overshot by {room(limit.over)}" if limit.over else f"{room(limit.limit - limit.used)} left"
    yield f"Limit, {label}", f"{amounts[0]} of {amounts[1]} ({limit.asked:g}); {rest}"
    yield f"Price of {words}", f"{unit * price:.3g} nats a token"


def _fastest(plan: Plan) -> Pairs:
    if plan.speed is None:
        return []
    proof = plan.speed.certificate
    return [
        ("Loss allowed for speed", f"{nats(plan.speed.loss * (plan.recipe.slack or 0))} nats a token"),
        ("Fastest within the slack", f"{proof.status}, gap {proof.gap:.3g}"),
        ("Times as fractions of dense", f"{proof.value:.6g} in all; no choice takes less than {proof.lower_bound:.6g}"),
        ("Found by", proof.method),
    ]


# --- the origin -----------------------------------------------------------------------------------------------------


def provenance(sources: Sources) -> Pairs:
    """Name and value pairs: model, method, text, latency table and machine."""
    plan = sources.plan
    recipe, made = plan.recipe, plan.measured
    text, table, measure, align = made.calibration, made.profile, recipe.measure, recipe.space.align
    step = "" if align is True else f", and of those the multiples of {align}"
    latencies = {
        f"Latencies, {timed.workload}": how_known(timed) + (f", {timed.unknown:,} unknown" if timed.unknown else "")
        for timed in plan.workloads
    }
    pairs = [
        ("Model", f"{made.model} ({made.family}), weights {made.digest[:12]}"),
        ("Method", f"{measure.method}; shots {measure.shots}; refit {recipe.refit}; factor {made.factor:g}"),
        ("Forms", f"dense, {', '.join(recipe.space.forms)}{fusion(plan)}"),
        ("Schemes", ", ".join(recipe.space.schemes)),
        ("Dims", f"those that the latency table shows to be sound{step}" if align else "every integer"),
        ("Calibration", f"{text}, digest {text.digest[:12]}"),
        ("Seed", str(measure.seed)),
        ("Made with", f"GAC {plan.gac_version}; this page with GAC {__version__}"),
        ("GPU", table.gpu),
        ("Latency table", f"{table.digest[:12]}{f'; {table.note}' if table.note else ''}"),
        *latencies.items(),
        ("Modelled latencies", modelled(plan).removeprefix("modelled latencies lie ")),
        ("Measured on", _machine(sources.profile)),
    ]
    return [(name, value) for name, value in pairs if value]


def _machine(profile: Profile | None) -> str:
    if profile is None:
        return "the table is not at hand, so its driver and libraries are not told"
    header = profile.header
    shared = f"; {header.shared_with}" if header.shared_with else ""
    return (
        f"{header.date}: driver {header.driver}, {header.libraries}; "
        f"{header.sm_count} SMs, {header.power_limit_w:g} W{shared}"
    )


def commands(sources: Sources) -> str:
    model, profile = quote(sources.plan.measured.model), sources.profile
    known = profile if profile is not None and profile.path in (*shipped_profiles(), *saved_profiles()) else None
    allocate = allocate_command(sources.plan, None if known is None else known.path.stem)
    return "\n".join([allocate, *apply_commands(sources.plan), f"gac eval DIR --against {model}"])
