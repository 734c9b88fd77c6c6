"""The plan in words: its summary, its proof, where it comes from, and how to make it again."""

from collections import Counter
from collections.abc import Iterator
from shlex import quote

from gac.core.version import __version__
from gac.plan.costs import BYTES, KV_NUMBERS, PARAMS
from gac.plan.plan import Plan, WorkloadLatency
from gac.plan.summary import (
    FUSED,
    allocate_command,
    apply_commands,
    how_known,
    lacking,
    modelled,
    over_fused,
    rounding_of,
    rule_of,
    run_as,
    split,
    stored,
)
from gac.profiling.folders import saved_profiles, shipped_profiles
from gac.profiling.table import Profile
from gac.reporting.formatting import counted, duration, megabytes, nats
from gac.reporting.report.sources import Sources

Pairs = list[tuple[str, str]]


def tiles(plan: Plan) -> list[tuple[str, str, str]]:
    """The figures that are looked for first: name, value, what it is beside."""
    budget, prediction, proof = plan.budget, plan.prediction, plan.certificate
    (used, total), (whole, dense), (bits, of_model) = plan.bytes, plan.model_bytes, plan.bits
    rounded = rounding_of(plan)
    return [
        ("Parameters kept", f"{budget.kept:.4f}", f"{budget.asked:g} asked"),
        ("Targeted weights", megabytes(used), f"{megabytes(total)} dense; {bits:.2f} bits each"),
        ("Whole model", megabytes(whole), f"{megabytes(dense)} dense; {of_model:.2f} bits each"),
        ("Predicted perplexity", f"{prediction.perplexity:,.2f}", f"{prediction.dense_perplexity:,.2f} dense"),
        *(
            (one.workload, f"{one.plan_ns / one.dense_ns:.3f}x", f"{duration(one.dense_ns)} dense{_tile_fused(one)}")
            if one.dense_ns and one.plan_ns
            else (one.workload, "unknown", f"the table {lacking(one, rounded)}")
            for one in plan.workloads
        ),
        ("Proof", proof.status, f"gap {proof.gap:.3g}"),
    ]


def _tile_fused(one: WorkloadLatency) -> str:
    ratio = over_fused(one)
    return "" if ratio is None else f"; {ratio:.3f}x of {duration(one.fused_ns)} {FUSED}"


# --- the summary ----------------------------------------------------------------------------------------------------


def summary(plan: Plan) -> Iterator[str]:
    """A few sentences each for budget, loss, time, proof, GPU, and what stayed dense."""
    yield _budget(plan)
    yield _memory(plan)
    yield (
        f"It is predicted to lose {nats(plan.prediction.loss)} nats a token{plan.measured.give_or_take()}: perplexity "
        f"{plan.prediction.dense_perplexity:,.2f} becomes {plan.prediction.perplexity:,.2f} on the calibration text. "
        "That is a prediction; gac eval measures it."
    )
    for one in plan.healed:
        yield (
            f"After that the model was healed on {one}. Its divergence from the dense model fell from "
            f"{nats(one.before)} to {nats(one.after)} nats a token, on {counted(one.held, 'window')} held out."
        )
    if plan.workloads:
        times = ", and ".join(_time(plan, one) for one in plan.workloads)
        yield f"The predicted time of the targeted weights {times}."
        yield from _speed(plan)
    (used, total), limit = plan.kv_numbers, plan.limit(KV_NUMBERS)
    if limit is not None or used != total:
        allowed = "" if limit is None else f"; {limit.limit:,} were allowed"
        yield f"The KV cache keeps {used:,} of {total:,} numbers a token{allowed}."
    if told := split(plan):
        yield f"It is split {'; '.join(told)}."
    yield _proof(plan)
    yield _forms(plan)
    yield f"It was made for the {plan.measured.profile.gpu}, by the latency table {plan.measured.profile.digest[:12]}."


def _speed(plan: Plan) -> Iterator[str]:
    """What the slack bought."""
    if plan.recipe.slack and plan.speed is None:
        yield "Speed was not looked at: the latency table does not hold the dense weights."
    if plan.speed is None:
        return
    given = plan.prediction.summed - plan.speed.loss
    least = zip(plan.workloads, plan.speed.latency_ns, strict=True)
    times = [f"{ns / one.dense_ns:.3f} of the dense time at {one.workload}" for one, ns in least if ns and one.dense_ns]
    yield (
        f"The least loss within the limits is {nats(plan.speed.loss)} nats a token, and takes {' and '.join(times)}. "
        f"The plan gives {nats(given)} nats for speed; {nats(plan.speed.loss * (plan.recipe.slack or 0))} were allowed."
    )


def _budget(plan: Plan) -> str:
    budget = plan.budget
    left = f"{budget.limit - budget.used:,} are left" if budget.used < budget.limit else "all of it is used"
    end = f"{budget.over:,} too many are used" if budget.over else left
    return (
        f"The plan keeps {budget.used:,} of {counted(budget.total, 'targeted parameter')} ({budget.kept:.4f}). The "
        f"budget was {budget.asked:g}, that is {budget.limit:,}; {end}. With embeddings and head, "
        f"{plan.kept_of_model:.4f} of the model are kept."
    )


def _memory(plan: Plan) -> str:
    (used, total), (whole, dense), (bits, of_model) = plan.bytes, plan.model_bytes, plan.bits
    limit = plan.limit(BYTES)
    allowed = "" if limit is None else f"; {limit.limit:,} were allowed"
    head = plan.measured.head
    ends = f" Embedding and head are in {head.scheme}, which loses {nats(head.loss)} nats a token." if head else ""
    return (
        f"The targeted weights take {used:,} of {total:,} bytes, {bits:.2f} bits for each dense parameter{allowed}. "
        f"The model takes {whole:,} of {dense:,} bytes ({whole / dense:.4f}), {of_model:.2f} bits for each.{ends}"
    )


def _time(plan: Plan, one: WorkloadLatency) -> str:
    asked = (plan.recipe.limits.latency or {}).get(one.workload)
    limit = "" if asked is None else f" ({asked:g} was allowed)"
    if one.dense_ns is None or one.plan_ns is None:
        return f"at {one.workload} is unknown: the latency table {lacking(one, rounding_of(plan))}{limit}"
    ratio = over_fused(one)
    fused = "" if ratio is None else f" and {ratio:.3f} of that with shared GEMMs ({duration(one.fused_ns)})"
    times = f"{duration(one.plan_ns)}, {one.plan_ns / one.dense_ns:.3f} of the dense time"
    return f"at {one.workload} is {times}{limit}{fused}"


def _proof(plan: Plan) -> str:
    proof, rule = plan.certificate, rule_of(plan)
    if plan.speed is not None:
        least, fastest = (f"{one.status}, gap {one.gap:.3g}" for one in (proof, plan.speed.certificate))
        return f"Two proofs: no choice within the limits loses less ({least}), none in the slack is faster ({fastest})."
    if proof.status == "optimal":
        return "The choice is proved optimal: within the limits, no choice of the candidates loses less."
    far = f"at most {nats(proof.gap)} nats a token{_share(plan)} from the best choice"
    if rule:
        return f"The rule {rule} made the choice. It is {far} with as many parameters."
    return f"The choice is not proved optimal: it is {far}."


def _share(plan: Plan) -> str:
    proof = plan.certificate
    return f" ({proof.gap / proof.value:.1%} of its loss)" if proof.value > 0 else ""


def _forms(plan: Plan) -> str:
    forms = Counter(weight.form for weight in plan.weights)
    parts = [f"{forms.pop('dense', 0):,} of {counted(len(plan.weights), 'weight')} stayed dense"]
    parts += [f"{number:,} became {form}" for form, number in sorted(forms.items())]
    end = f" Of the chosen dims, {plan.aligned_fraction:.1%} are multiples of 8." if forms else ""
    schemes = f" Numbers are stored so: {stored(plan)}." if rounding_of(plan) else ""
    return f"{', '.join(parts)}.{end}{schemes}"


# --- the proof, and where the plan comes from -----------------------------------------------------------------------

_PRICED = {
    PARAMS: ("a million parameters", 1e6),
    BYTES: ("a million bytes", 1e6),
    KV_NUMBERS: ("a number in the KV cache", 1.0),
}
"""What a large unit of a limit is called, and how many small ones it is."""


def certificate(plan: Plan) -> Pairs:
    """Name and value pairs; what each limit is worth is the multiplier of the certificate."""
    proof = plan.certificate
    prices = []
    for limit, price in zip(plan.limits, proof.multipliers, strict=True):
        what, unit = _PRICED.get(limit.column) or (f"a microsecond at {limit.column.removeprefix('ns:')}", 1e3)
        prices.append((f"Price of {what}", f"{unit * price:.3g} nats a token"))
    return [
        ("Status", proof.status),
        ("Loss of the choice" if plan.speed is None else "Least loss", f"{proof.value:.6g} nats a token"),
        ("No choice loses less than", f"{proof.lower_bound:.6g} nats a token"),
        ("Gap", f"{proof.gap:.3g} nats a token{_share(plan) if proof.gap else ''}"),
        *prices,
        ("Found by", proof.method),
        *_fastest(plan),
    ]


def _fastest(plan: Plan) -> Pairs:
    """The second proof, of speed."""
    if plan.speed is None:
        return []
    proof = plan.speed.certificate
    return [
        ("Fastest within the slack", f"{proof.status}, gap {proof.gap:.3g}"),
        ("Times as fractions of dense", f"{proof.value:.6g} in all; no choice takes less than {proof.lower_bound:.6g}"),
        ("Found by", proof.method),
    ]


def provenance(sources: Sources) -> Pairs:
    """Name and value pairs."""
    plan = sources.plan
    recipe, made = plan.recipe, plan.measured
    text, table, measure = made.calibration, made.profile, recipe.measure
    return [
        ("Model", f"{made.model} ({made.family}), weights {made.digest[:12]}"),
        ("Method", f"{measure.method}; shots {measure.shots}; refit {recipe.refit}; factor {made.factor:g}"),
        ("Forms", f"dense, {', '.join(recipe.space.forms)}{run_as(plan)}"),
        ("Schemes", ", ".join(recipe.space.schemes)),
        ("Dims", _dims(recipe.space.align)),
        ("Calibration", f"{text}, digest {text.digest[:12]}"),
        ("Seed", str(measure.seed)),
        ("Made with", f"GAC {plan.gac_version}; this page with GAC {__version__}"),
        ("GPU", table.gpu),
        ("Latency table", f"{table.digest[:12]}{f'; {table.note}' if table.note else ''}"),
        *((f"Latencies, {one.workload}", _looked_up(one)) for one in plan.workloads),
        *([("Modelled latencies", told.removeprefix("modelled latencies lie "))] if (told := modelled(plan)) else []),
        ("Measured on", _machine(sources.profile)),
    ]


def _dims(align: bool | int) -> str:
    if align is False:
        return "every integer"
    step = "" if align is True else f", and of those the multiples of {align}"
    return f"those that the latency table shows to be sound{step}"


def _looked_up(one: WorkloadLatency) -> str:
    missing = f", {one.unknown:,} unknown" if one.unknown else ""
    return f"{how_known(one)}{missing}"


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
    """What makes the plan again, and applies and checks it."""
    model, profile = quote(sources.plan.measured.model), sources.profile
    known = profile is not None and profile.path in (*shipped_profiles(), *saved_profiles())
    return "\n".join(
        [
            allocate_command(sources.plan, profile.path.stem if profile is not None and known else None),
            *apply_commands(sources.plan),
            f"gac eval DIR --against {model}",
        ]
    )
