"""The plan in words: its summary, what stayed dense and why, its proof, where it comes from."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shlex import quote

from gac.allocation.reproduce import allocate_command, rule_of
from gac.costs import BYTES, KV_NUMBERS, PARAMS
from gac.models.sites import short_names
from gac.plan import Plan, SiteChoice
from gac.plan_summary import run_as
from gac.profiling.table import Profile, saved_profiles, shipped_profiles
from gac.reporting.report.formatting import counted, duration, nats, ranges
from gac.reporting.report.reasons import Trade, trades, unweighed
from gac.reporting.report.sources import Sources
from gac.version import __version__

Rows = tuple[tuple[str, str], ...]


# --- the summary ----------------------------------------------------------------------------------------------------


def summary(sources: Sources) -> tuple[str, ...]:
    """A few sentences each for budget, loss, time, proof, GPU, and what stayed dense."""
    plan = sources.plan.plan
    return tuple(
        part
        for part in (_budget(plan), _loss(plan), _time(plan), _cache(plan), _proof(plan), _forms(plan), _gpu(plan))
        if part
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


def _loss(plan: Plan) -> str:
    told = plan.prediction
    return (
        f"It is predicted to lose {nats(told.loss)} nats a token: perplexity {told.dense_perplexity:,.2f} becomes "
        f"{told.perplexity:,.2f} on the calibration text. That is a prediction; gac eval measures it."
    )


def _time(plan: Plan) -> str:
    parts = []
    for one in plan.workloads:
        asked = plan.recipe.limits.latency.get(one.workload)
        limit = "" if asked is None else f" ({asked:g} was allowed)"
        if one.dense_ns is None or one.plan_ns is None:
            missing = f"unknown: the latency table lacks shapes of {counted(one.unknown, 'weight')}"
            parts.append(f"at {one.workload} is {missing if one.unknown else 'unknown'}{limit}")
        else:
            ratio = one.plan_ns / one.dense_ns
            parts.append(f"at {one.workload} is {duration(one.plan_ns)}, {ratio:.3f} of the dense time{limit}")
    return f"The predicted time of the targeted weights {', and '.join(parts)}." if parts else ""


def _cache(plan: Plan) -> str:
    (used, total), limit = plan.kv_numbers, plan.limit(KV_NUMBERS)
    if limit is None and used == total:
        return ""
    allowed = "" if limit is None else f"; {limit.limit:,} were allowed"
    return f"The KV cache keeps {used:,} of {total:,} numbers a token{allowed}."


def _proof(plan: Plan) -> str:
    proof, rule = plan.certificate, rule_of(plan)
    if proof.status == "optimal":
        return "The choice is proved optimal: within the limits, no choice of the candidates loses less."
    told = f"at most {nats(proof.gap)} nats a token{_share(plan)} from the best choice"
    if rule:
        return f"The rule {rule} made the choice. It is {told} with as many parameters."
    return f"The choice is not proved optimal: it is {told}."


def _share(plan: Plan) -> str:
    proof = plan.certificate
    return f" ({proof.gap / proof.value:.1%} of its loss)" if proof.value > 0 else ""


def _forms(plan: Plan) -> str:
    forms = Counter(weight.form for weight in plan.weights)
    dense, count = forms.pop("dense", 0), len(plan.weights)
    parts = [f"{dense:,} of {counted(count, 'weight')} stayed dense"]
    parts += [f"{number:,} became {form}" for form, number in sorted(forms.items())]
    end = f" Of the chosen dims, {plan.aligned_fraction:.1%} are multiples of 8." if forms else ""
    return f"{', '.join(parts)}.{end}"


def _gpu(plan: Plan) -> str:
    return f"It was made for the {plan.measured.profile.gpu}, by the latency table {plan.measured.profile.digest[:12]}."


# --- what stayed dense ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stayed:
    """The dense weights of one projection.

    Attributes:
        where: in which layers, as ranges.
        nearest: of all smaller candidates the one that came nearest, and the layer it is of; None where not known.
    """

    name: str
    count: int
    layers: int
    where: str
    layer: int
    nearest: Trade | None


def stayed_dense(plan: Plan) -> tuple[Stayed, ...]:
    """By projection, in the order of the model."""
    found: dict[str, list[SiteChoice]] = {}
    total: Counter[str] = Counter()
    for site, name, dense in _named(plan):
        total[name] += 1
        if dense:
            found.setdefault(name, []).append(site)
    return tuple(_stayed(plan, name, sites, total[name]) for name, sites in found.items())


def _named(plan: Plan) -> Iterator[tuple[SiteChoice, str, bool]]:
    for site in plan.sites:
        called = short_names([weight.name for weight in site.weights])
        for weight in site.weights:
            yield site, called[weight.name], weight.form == "dense"


def _stayed(plan: Plan, name: str, sites: Sequence[SiteChoice], layers: int) -> Stayed:
    smaller = [(trade, site.layer) for site in sites for trade in trades(plan, site) if trade.freed > 0]
    where = ranges([site.layer for site in sites])
    if rule_of(plan) or not smaller:
        return Stayed(name, len(sites), layers, where, -1, None)
    trade, layer = min(smaller, key=lambda pair: pair[0].lost - pair[0].worth)
    return Stayed(name, len(sites), layers, where, layer, trade)


def about_dense(plan: Plan) -> str:
    """How to read that table."""
    if rule := rule_of(plan):
        return f"The rule {rule} weighs no other choice against staying dense."
    if not any(site.alternatives for site in plan.sites):
        return unweighed(plan)
    return (
        "A site stays dense where each smaller candidate loses more than the parameters that it frees would win "
        "elsewhere. Of each projection, the candidate that came nearest:"
    )


# --- the proof, and where the plan comes from -----------------------------------------------------------------------


def certificate(plan: Plan) -> Rows:
    """Name and value pairs."""
    proof = plan.certificate
    rows = [
        ("Status", proof.status),
        ("Loss of the choice", f"{proof.value:.6g} nats a token"),
        ("No choice loses less than", f"{proof.lower_bound:.6g} nats a token"),
        ("Gap", f"{proof.gap:.3g} nats a token{_share(plan) if proof.gap else ''}"),
        *((f"Price of {what}", f"{price:.3g} nats a token") for what, price in _prices(plan)),
        ("Found by", proof.method),
    ]
    return tuple(rows)


def _prices(plan: Plan) -> list[tuple[str, float]]:
    """What a large unit of each limit is worth, from the multipliers of the certificate."""
    known = {
        PARAMS: ("a million parameters", 1e6),
        BYTES: ("a million bytes", 1e6),
        KV_NUMBERS: ("a number in the KV cache", 1.0),
    }
    found = []
    for limit, price in zip(plan.limits, plan.certificate.multipliers, strict=True):
        name, unit = known.get(limit.column) or (f"a microsecond at {limit.column.removeprefix('ns:')}", 1e3)
        found.append((name, unit * price))
    return found


def provenance(sources: Sources) -> Rows:
    """Name and value pairs."""
    plan = sources.plan.plan
    recipe, made = plan.recipe, plan.measured
    text, table, measure = made.calibration, made.profile, recipe.measure
    rows = [
        ("Model", f"{made.model} ({made.family}), weights {made.digest[:12]}"),
        ("Method", f"{measure.method}; shots {measure.shots}; refit {recipe.refit}; factor {made.factor:g}"),
        ("Forms", f"dense, {', '.join(recipe.space.forms)}{run_as(plan)}"),
        ("Dims", _dims(plan)),
        ("Calibration", f"{text.windows} x {text.window_tokens} tokens of {text.text}, digest {text.digest[:12]}"),
        ("Seed", str(measure.seed)),
        ("Made with", f"GAC {plan.gac_version}; this page with GAC {__version__}"),
        ("GPU", table.gpu),
        ("Latency table", f"{table.digest[:12]}{f'; {table.note}' if table.note else ''}"),
        *_looked_up(plan),
        *_machine(sources.profile),
    ]
    return tuple(rows)


def _dims(plan: Plan) -> str:
    if plan.recipe.space.align is False:
        return "every integer"
    step = "" if plan.recipe.space.align is True else f", and of those the multiples of {plan.recipe.space.align}"
    return f"those that the latency table shows to be sound{step}"


def _looked_up(plan: Plan) -> Iterator[tuple[str, str]]:
    for one in plan.workloads:
        missing = f", {one.unknown:,} unknown" if one.unknown else ""
        yield f"Latencies, {one.workload}", f"{one.measured:,} measured, {one.interpolated:,} interpolated{missing}"


def _machine(profile: Profile | None) -> Rows:
    if profile is None:
        return (("Measured on", "the table is not at hand, so its driver and libraries are not told"),)
    header = profile.header
    shared = f"; {header.shared_with}" if header.shared_with else ""
    return (
        (
            "Measured on",
            f"{header.date}: driver {header.driver}, CUDA {header.cuda}, cuBLAS {header.cublas}, cuDNN {header.cudnn}, "
            f"PyTorch {header.torch}; {header.sm_count} SMs, {header.power_limit_w:g} W{shared}",
        ),
    )


def commands(sources: Sources) -> str:
    """What makes the plan again, and applies and checks it."""
    plan = sources.plan.plan
    model = quote(plan.measured.model)
    profile = sources.profile
    known = profile is not None and profile.path in (*shipped_profiles(), *saved_profiles())
    return "\n".join(
        [
            allocate_command(plan, profile.path.stem if profile is not None and known else None),
            f"gac compress {model} --plan plan.json -o DIR",
            f"gac eval DIR --against {model}",
        ]
    )
