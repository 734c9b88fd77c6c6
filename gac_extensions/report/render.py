"""The page as one HTML file: a template filled with tables and the plan in words; nothing else is allowed to run."""

import base64
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from gac.core.version import __version__
from gac.core.words import duration, megabytes, nats, number_of
from gac.core.workloads import Workload
from gac.plan import summary
from gac.plan.costs import COSTS
from gac.plan.layers import legend_of
from gac.plan.plan import Limit, Plan, WorkloadLatency
from gac.profiling.folders import saved_profiles, shipped_profiles
from gac.profiling.table import Profile
from gac_extensions.report import reasons, tables
from gac_extensions.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, charts
from gac_extensions.report.measured import mean_ratio, texts_table
from gac_extensions.report.sources import Sources
from gac_extensions.report.verdicts import verdicts

Pairs = list[tuple[str, str]]
Tiles = list[tuple[str, str, str]]


def report_page(sources: Sources) -> str:
    """The page. Every name in it is escaped, and its content policy lets no request leave and no other script run."""
    return filled(Path(__file__).with_name("page.html"), _content(sources))


def filled(template: Path, content: Mapping[str, Any]) -> str:
    """Fill a template, which may use those of the report, with the style and the script of every page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    files = {name: Path(__file__).with_name(f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    hashes = {f"{name}_hash": _hash(content) for name, content in files.items()}
    return environment.get_template(template.name).render(**files, **hashes, **content)


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _content(sources: Sources) -> dict[str, Any]:
    plan, (columns, rows) = sources.plan, tables.heat_map(sources)
    cells = [cell for row in rows.values() for cell in row if cell]
    sites, keys = tables.sites_table(plan)
    return {
        "sources": sources,
        "plan": plan,
        "kept": summary.what_is_kept(plan),
        "summary": [(label[0].upper() + label[1:], value) for label, value in summary.facts(plan)],
        "verdicts": verdicts(sources),
        "tiles": _tiles(sources),
        "texts": texts_table(plan, sources.measured),
        "columns": columns,
        "rows": rows,
        "cells": [{name: cell[name] for name in ("label", "facts", "reasons")} for cell in cells],
        "legend": legend_of(plan),
        "stayed": tables.stayed_dense(plan),
        "about_dense": tables.about_dense(plan),
        "charts": charts(sources),
        "called": {name: f"the {cost.label}" for name, cost in COSTS.items()},
        "size": (WIDTH, HEIGHT),
        "frame": {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        "alike": all(comparison.same_prediction for comparison in sources.comparisons.values()),
        "plans": tables.plans_table(sources),
        "sites": sites,
        "keys": keys,
        "forms": [list(dict.fromkeys(weight.form for weight in site.weights)) for site in plan.sites],
        "sizes": reasons.size_noun(plan),
        "certificate": _certificate(plan),
        "provenance": _provenance(sources),
        "commands": _commands(sources),
        "tokens": sources.tokens,
    }


# --- headline figures -----------------------------------------------------------------------------------------------


def _tiles(sources: Sources) -> tuple[Tiles, Tiles]:
    """Label, figure and words: of what decides, time first, and of the rest."""
    plan = sources.plan
    budget, proof, (used, total) = plan.budget, plan.certificate, plan.bytes
    times = [(bool(timed.plan_ns and timed.dense_ns), _time(plan, timed)) for timed in plan.workloads]
    return (
        [*(tile for known, tile in times if known), _perplexity(sources), _model(plan)],
        [
            ("Parameters kept", f"{budget.kept:.4f}", f"{budget.asked:g} asked"),
            ("Targeted weights", megabytes(used), f"{megabytes(total)} dense; {plan.bits[0]:.2f} bits each"),
            *(tile for known, tile in times if not known),
            ("Proof", proof.status, f"gap {proof.gap:.3g}"),
        ],
    )


def _time(plan: Plan, timed: WorkloadLatency) -> tuple[str, str, str]:
    if not timed.dense_ns or not timed.plan_ns:
        return timed.workload, "unknown", f"the table {summary.lacking(plan, timed)}"
    rate, dense = map(Workload.parse(timed.workload).tokens_per_second, (timed.plan_ns, timed.dense_ns))
    of = f"whole steps in {plan.recipe.deployment.engine}" if timed.rest_ns else "targeted weights alone"
    times = f"{rate:,.0f} tokens/s, {dense:,.0f} dense; {duration(timed.plan_ns)} of {duration(timed.dense_ns)}; {of}"
    return f"Time over dense, {timed.workload}", f"{timed.plan_ns / timed.dense_ns:.3f}x", times


def _perplexity(sources: Sources) -> tuple[str, str, str]:
    texts, prediction = sources.measured, sources.plan.prediction
    predicted, dense = prediction.perplexity, prediction.dense_perplexity
    before = " before healing" if sources.healed else ""
    if texts:
        of = f"of dense; {number_of(len(texts), 'text')}; {predicted / dense:.3f}x predicted{before}"
        return "Measured perplexity", f"{mean_ratio(texts):.3f}x", of
    return "Predicted perplexity", f"{predicted:,.2f}", f"{dense:,.2f} dense; {predicted / dense:.3f}x{before}"


def _model(plan: Plan) -> tuple[str, str, str]:
    used, dense = plan.model_bytes
    return "Whole model", f"{used / 1e9:.4g} GB", f"{dense / 1e9:.4g} GB dense; {plan.bits[1]:.2f} bits each"


# --- the proof ------------------------------------------------------------------------------------------------------


def _certificate(plan: Plan) -> Pairs:
    proof, rule = plan.certificate, summary.rule_of(plan)
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
    cost, workload = COSTS.get(limit.column), limit.column.removeprefix("ns:")
    shown = duration if cost is None else "{:,}".format
    label = f"latency, {workload}" if cost is None else cost.label
    words, unit = (f"a microsecond at {workload}", 1e3) if cost is None else cost.priced
    rest = f"overshot by {shown(limit.over)}" if limit.over else f"{shown(limit.limit - limit.used)} left"
    yield f"Limit, {label}", f"{shown(limit.limit)} of {shown(limit.total)} ({limit.asked:g}); {rest}"
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


def _provenance(sources: Sources) -> Pairs:
    plan = sources.plan
    recipe, measured = plan.recipe, plan.measured
    text, table, measure, align = measured.calibration, measured.profile, recipe.measure, recipe.space.align
    step = "" if align is True else f", and of those the multiples of {align}"
    latencies = []
    for timed in plan.workloads:
        unknown = f", {timed.unknown:,} unknown" if timed.unknown else ""
        latencies.append((f"Latencies, {timed.workload}", f"{summary.how_known(timed)}{unknown}"))
    pairs = [
        ("Model", f"{measured.model} ({measured.family}), weights {measured.digest[:12]}"),
        ("Method", f"{measure.method}; shots {measure.shots}; refit {recipe.refit}; factor {measured.factor:g}"),
        ("Forms", f"dense, {', '.join(recipe.space.forms)}{summary.fusion(plan)}"),
        ("Schemes", ", ".join(recipe.space.schemes)),
        ("Dims", f"those that the latency table shows to be sound{step}" if align else "every integer"),
        ("Calibration", f"{text}, digest {text.digest[:12]}"),
        ("Seed", str(measure.seed)),
        ("Made with", f"GAC {plan.gac_version}; this page with GAC {__version__}"),
        ("GPU", table.gpu),
        ("Latency table", f"{table.digest[:12]}{f'; {table.note}' if table.note else ''}"),
        *latencies,
        ("Modelled latencies", summary.modelled(plan).removeprefix("modelled latencies lie ")),
        ("Measured on", _machine(sources.profile)),
    ]
    return [(name, value) for name, value in pairs if value]


def _machine(profile: Profile | None) -> str:
    if profile is None:
        return "the table is not at hand, so its driver and libraries are not told"
    header = profile.header
    gpu = f"{header.sm_count} SMs, {header.power_limit_w:g} W"
    words = f"{header.date}: driver {header.driver}, {header.libraries}; {gpu}"
    return f"{words}; {header.shared_with}" if header.shared_with else words


def _commands(sources: Sources) -> str:
    model, profile = quote(sources.plan.measured.model), sources.profile
    known = profile if profile is not None and profile.path in (*shipped_profiles(), *saved_profiles()) else None
    allocate = summary.allocate_command(sources.plan, None if known is None else known.path.stem)
    return "\n".join([allocate, *summary.apply_commands(sources.plan), f"gac eval DIR --against {model}"])
