"""What the page of a plan of tokens kept says: tiles, sentences, layers by budgets, the proof, and the commands."""

from collections.abc import Mapping
from shlex import join
from typing import Any, NamedTuple

from gac.core.display import Table
from gac.core.version import __version__
from gac.core.words import duration, megabytes, nats
from gac.plan.choices import counted
from gac.plan.costs import KV_NUMBERS
from gac.plan.plan import Plan
from gac.plan.token_plan import LayerTokens, TokenPlan, facts
from gac.reporting.figures.tokens import check_alike
from gac.reporting.tokens import figures


class Cell(NamedTuple):
    """What a layer loses with one budget; how dark it is where that was chosen."""

    tokens: str
    text: str
    chosen: bool
    shade: int


def content(plan: TokenPlan, name: str, against: Mapping[str, TokenPlan]) -> dict[str, Any]:
    """All that the template asks for.

    Raises:
        PlanError: the plans are for different models or contexts.
    """
    plans = {name: plan} | dict(against)
    check_alike(plans)
    return {
        "plan": plan,
        "name": name,
        "tiles": _tiles(plan),
        "summary": _sentences(plan),
        **_layers(plan),
        "plans": _plans(plans),
        "certificate": _certificate(plan),
        "provenance": _provenance(plan),
        "commands": _commands(plan),
    }


def beside(plan: TokenPlan, weights: Plan) -> dict[str, Any]:
    """What the page of a plan of weights says of the tokens that are kept beside it."""
    used, dense = _together(plan, weights)
    cut = f"{used:,} of {dense:,} numbers of 16 bits ({used / dense:.4f})"
    both = f"With what the plan of weights caches of a token, {plan.context:,} tokens take {cut} in all layers."
    return _layers(plan) | {"summary": [*_sentences(plan), both]}


def _together(plan: TokenPlan, weights: Plan) -> tuple[int, int]:
    """Numbers of 16 bits that are cached of one context: with both plans, and with neither."""
    used = dense = 0
    for site in weights.sites:
        kept, whole = counted(site.weights, KV_NUMBERS)
        used += kept * plan.kept(site.layer, plan.context)
        dense += whole * (plan.kept(site.layer, plan.context) if site.layer in plan.whole else plan.context)
    return used, dense


def _sentences(plan: TokenPlan) -> list[str]:
    return [f"{what.capitalize()}: {value}." for what, value in facts(plan)]


def _layers(plan: TokenPlan) -> dict[str, Any]:
    """The priced budgets, and a row of cells for each layer."""
    rows = [(one.layer, _cells(one, plan.context)) for one in plan.layers]
    return {"budgets": list(dict(plan.layers[0].priced)), "rows": rows}


def _tiles(plan: TokenPlan) -> list[tuple[str, str, str]]:
    """The figures that are looked for first: name, value, what it is beside."""
    used, dense = plan.cache_bytes(plan.context)
    return [
        ("Tokens kept", f"{plan.used / plan.total:.4f}", f"{plan.keep:g} asked"),
        ("Cache of a context", megabytes(used), f"{megabytes(dense)} dense, of {plan.context:,} tokens"),
        ("Predicted loss", nats(plan.loss), "nats a token"),
        *(
            (one.workload, f"{one.plan_ns / one.dense_ns:.3f}x", f"{duration(one.dense_ns)} of attention dense")
            if one.dense_ns and one.plan_ns
            else (one.workload, "unknown", "the table lacks attention")
            for one in plan.workloads
        ),
        ("Proof", plan.certificate.status, f"gap {plan.certificate.gap:.3g}"),
    ]


def _cells(one: LayerTokens, context: int) -> list[Cell]:
    """One a budget; shades as in the map of weights, from all tokens to few."""
    shades = [0.999, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1]
    return [
        Cell(f"{tokens:,}", nats(loss), tokens == one.kept, sum(tokens / context < share for share in shades))
        for tokens, loss in one.priced
    ]


def _plans(plans: Mapping[str, TokenPlan]) -> Table:
    workloads = dict.fromkeys(one.workload for plan in plans.values() for one in plan.workloads)
    told = {name: figures(plan, workloads) for name, plan in plans.items()}
    columns = [("Plan", "<"), *((heading, "<" if heading == "press" else ">") for heading in next(iter(told.values())))]
    return Table(columns, [[name, *row.values()] for name, row in told.items()])


def _certificate(plan: TokenPlan) -> list[tuple[str, str]]:
    proof, limited = plan.certificate, [f"a microsecond at {workload}" for workload in plan.latency]
    prices = zip(["1,000 tokens", *limited], proof.multipliers, strict=True)
    return [
        ("Status", proof.status),
        ("Loss of the choice", f"{proof.value:.6g} nats a token"),
        ("No choice loses less than", f"{proof.lower_bound:.6g} nats a token"),
        ("Gap", f"{proof.gap:.3g} nats a token"),
        *((f"Price of {what}", f"{1e3 * price:.3g} nats a token") for what, price in prices),
        ("Found by", proof.method),
    ]


def _provenance(plan: TokenPlan) -> list[tuple[str, str]]:
    options = ", ".join(f"{name}={value}" for name, value in plan.options.items()) or "its defaults"
    return [
        ("Model", f"{plan.model} ({plan.family}), weights {plan.digest[:12]}"),
        ("Press", f"{plan.press} of kvpress, {options}"),
        ("Text", f"{plan.text}, digest {plan.text_digest[:12]}"),
        ("Windows", f"{plan.windows} of {plan.context:,} tokens and the {plan.following:,} that follow"),
        ("Budgets", f"multiples of {plan.step} tokens, or all"),
        ("Made with", f"GAC {plan.gac_version}; this page with GAC {__version__}"),
        *([("Latency table", f"{table.gpu}, {table.digest[:12]}; {table.note}")] if (table := plan.profile) else []),
    ]


def _commands(plan: TokenPlan) -> str:
    """What makes the plan again, and what evicts by it."""
    text = f"{plan.text}:{plan.windows}x{plan.context + plan.following}"
    shares = [word for tokens, _ in plan.layers[0].priced[:-1] for word in ("--share", f"{tokens / plan.context!r}")]
    words = [plan.model, "--keep", f"{plan.keep!r}", "--press", plan.press, "--calibration", text]
    words += ["--following", str(plan.following), "--step", str(plan.step), *shares]
    words += [word for one in plan.workloads for word in ("--workload", one.workload)]
    words += [word for name, share in plan.latency.items() for word in ("--latency", f"{name}={share!r}")]
    evicts = "with gac.press('tokens.json')(model):\n    model.generate(ids)"
    return f"gac tokens {join([*words, '-o', 'tokens.json'])}\n\n# in Python\n{evicts}"
