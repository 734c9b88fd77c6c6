"""The page of any plan. A plan of tokens has a template of its own, and a section on the page of a plan of weights."""

from collections.abc import Mapping
from pathlib import Path
from shlex import join
from typing import Any

from gac.allocation.frontier import Frontier
from gac.core.arguments import checked
from gac.core.errors import PlanError
from gac.core.io import complete_file
from gac.core.version import __version__
from gac.core.words import duration, megabytes, nats
from gac.plan.choices import counted
from gac.plan.costs import KV_NUMBERS
from gac.plan.plan import Plan
from gac.profiling.table import Profile
from gac_extensions.report.measured import read_measured
from gac_extensions.report.render import Tiles, filled, report_page
from gac_extensions.report.sources import Sources, profile_of
from gac_extensions.tokens.plan import TokenPlan, check_comparable, comparison_table, facts, latency_ratio, load_plans

_SHADES = (0.999, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)  # as in the map of weights, from all tokens to few


@checked
def report(
    plan: Plan | TokenPlan | str | Path,
    output: str | Path = "report.html",
    *,
    against: Mapping[str, Plan | TokenPlan | str | Path] | None = None,
    frontier: Frontier | str | Path | None = None,
    profile: Profile | str | Path | None = None,
    tokens: TokenPlan | str | Path | None = None,
    measured: str | Path | None = None,
    name: str = "plan",
) -> Path:
    """Write one page about a plan: the choice for every weight with its reasons, the proof, the command to repeat it.

    For a plan of tokens: the tokens that every layer keeps, and the loss of each budget. Plans and frontiers may be
    given by their paths, the profile by its name too.

    Args:
        output: a single HTML file that needs no network; an existing one is replaced, completely or not at all.
        against: other plans of the same kind for the same model, by the name to show.
        frontier: the best choices for other budgets, to draw them; none with a plan of tokens.
        profile: the latency table that the plan names. By default it is looked up among the shipped and saved ones;
            without it the page does not show what the next dims would cost.
        tokens: a plan of tokens for the same model, to show with the plan of weights.
        measured: what ``gac eval --against -o`` wrote for the plan's model, to show beside the predictions.
        name: the name of the plan on the page.

    Returns:
        The path of the page.

    Raises:
        PlanError: a plan, the frontier or what was measured is for another model or of another kind, or the
            frontier's losses are of another scale.
        ProfileError: the profile is not the one that the plan names.
        GacError: the file cannot be written.
    """
    against = against or {}
    opened, *plans = load_plans((plan, *against.values()))
    others: Any = dict(zip(against, plans, strict=True))
    if isinstance(opened, TokenPlan):
        if frontier or profile or tokens or measured:
            problem = "a plan of tokens kept beside a frontier, a latency table, measurements or another plan of tokens"
            raise PlanError(problem, "the plan, and other plans of tokens", "Leave the others out.")
        page = tokens_page(opened, name, others)
    else:
        points = None if frontier is None else Frontier.opened(frontier)
        table = profile_of(opened) if profile is None else Profile.opened(profile)
        section = None if tokens is None else tokens_section(TokenPlan.opened(tokens), opened, name)
        texts = () if measured is None else read_measured(Path(measured), opened)
        page = report_page(Sources(opened, name, others, points, table, section, texts))
    with complete_file(Path(output), "report") as temporary:
        temporary.write_bytes(page.encode())
    return Path(output)


def tokens_page(plan: TokenPlan, name: str = "plan", against: Mapping[str, TokenPlan] | None = None) -> str:
    """The page of a plan of tokens, as HTML without a script; a PlanError for plans that cannot be compared."""
    plans = {name: plan} | dict(against or {})
    check_comparable(plans)
    content = {
        "plan": plan,
        "name": name,
        "tiles": _tiles(plan),
        **_layers(plan),
        "plans": comparison_table(plans),
        "certificate": _certificate(plan),
        "provenance": _provenance(plan),
        "commands": _commands(plan),
    }
    return filled(Path(__file__).with_name("tokens.html"), content)


def tokens_section(plan: TokenPlan, weights: Plan, name: str = "plan") -> dict[str, Any]:
    """The section about tokens on the page of a plan of weights; a PlanError if they are for different weights."""
    if plan.digest != weights.measured.digest:
        problem = f"plan {name} for {weights.measured.model} beside a plan of tokens for {plan.model}"
        raise PlanError(problem, "plans for the same weights", "Make the plan of tokens for the same model.")
    used = dense = 0
    for site in weights.sites:
        numbers, dense_numbers = counted(site.weights, KV_NUMBERS)
        tokens = plan.kept(site.layer, plan.context)
        used += numbers * tokens
        dense += dense_numbers * (tokens if site.layer in plan.whole else plan.context)
    cut = f"{used:,} of {dense:,} numbers of 16 bits ({used / dense:.4f})"
    both = f"With what the plan of weights caches of a token, {plan.context:,} tokens take {cut} in all layers."
    return _layers(plan, both)


def _layers(plan: TokenPlan, *more: str) -> dict[str, Any]:
    """The sentences, and the loss of every layer with each budget; ``shade`` is for the chosen one."""
    budgets = list(dict(plan.layers[0].priced))
    shades = {tokens: sum(tokens / plan.context < share for share in _SHADES) for tokens in budgets}
    rows = []
    for layer in plan.layers:
        cells = [
            {"tokens": f"{tokens:,}", "text": nats(loss), "chosen": tokens == layer.kept, "shade": shades[tokens]}
            for tokens, loss in layer.priced
        ]
        rows.append((layer.layer, cells))
    summary = [f"{name.capitalize()}: {value}." for name, value in facts(plan)]
    return {"budgets": budgets, "rows": rows, "summary": [*summary, *more]}


def _tiles(plan: TokenPlan) -> tuple[Tiles, Tiles]:
    used, dense = plan.cache_bytes(plan.context)
    latencies = []
    for timed in plan.workloads:
        ratio = latency_ratio(timed)
        note = f"{duration(timed.dense_ns)} of attention dense" if ratio else "the table lacks attention"
        latencies.append((timed.workload, ratio or "unknown", note))
    cache = ("Cache of a context", megabytes(used), f"{megabytes(dense)} dense, of {plan.context:,} tokens")
    return (
        [*latencies, ("Predicted loss", nats(plan.loss), "nats a token"), cache],
        [
            ("Tokens kept", f"{plan.used / plan.total:.4f}", f"{plan.keep:g} asked"),
            ("Proof", plan.certificate.status, f"gap {plan.certificate.gap:.3g}"),
        ],
    )


def _certificate(plan: TokenPlan) -> list[tuple[str, str]]:
    proof, limited = plan.certificate, [f"a microsecond at {workload}" for workload in plan.latency]
    prices = zip(["1,000 tokens", *limited], proof.multipliers, strict=True)
    return [
        ("Status", proof.status),
        ("Loss of the choice", f"{proof.value:.6g} nats a token"),
        ("No choice loses less than", f"{proof.lower_bound:.6g} nats a token"),
        ("Gap", f"{proof.gap:.3g} nats a token"),
        *((f"Price of {unit}", f"{1e3 * price:.3g} nats a token") for unit, price in prices),
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
    text = f"{plan.text}:{plan.windows}x{plan.context + plan.following}"
    shares = [word for tokens, _ in plan.layers[0].priced[:-1] for word in ("--share", f"{tokens / plan.context!r}")]
    words = [plan.model, "--keep", f"{plan.keep!r}", "--press", plan.press, "--calibration", text]
    words += ["--following", str(plan.following), "--step", str(plan.step), *shares]
    words += [word for timed in plan.workloads for word in ("--workload", timed.workload)]
    words += [word for name, share in plan.latency.items() for word in ("--latency", f"{name}={share!r}")]
    evicts = "with gac.press('tokens.json')(model):\n    model.generate(ids)"
    return f"gac tokens {join([*words, '-o', 'tokens.json'])}\n\n# in Python\n{evicts}"
