"""The page as one HTML file: a template filled, its style and script inside it, and nothing else allowed to run."""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gac.allocation.frontier import Frontier
from gac.core.arguments import checked
from gac.core.errors import PlanError
from gac.core.io import complete_file
from gac.plan.plan import Plan
from gac.plan.summary import what_is_kept
from gac.plan.token_plan import TokenPlan, check_one_kind, either
from gac.profiling.table import Profile
from gac.reporting.frontier import SIZES
from gac.reporting.report import reasons, summary, tables
from gac.reporting.report import tokens as of_tokens
from gac.reporting.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, charts
from gac.reporting.report.sources import Sources, profile_of
from gac.reporting.tables import legend_of


@checked
def report(
    plan: Plan | TokenPlan | str | Path,
    output: str | Path = "report.html",
    *,
    against: Mapping[str, Plan | TokenPlan | str | Path] | None = None,
    frontier: Frontier | str | Path | None = None,
    profile: Profile | str | Path | None = None,
    tokens: TokenPlan | str | Path | None = None,
    name: str = "plan",
) -> Path:
    """Write one page about a plan: what every weight becomes and why, the proof, how to make it again.

    Of a plan of tokens kept it says what every layer keeps and what each budget loses. Plans and frontiers may be given
    by their paths, the profile by its name too.

    Args:
        output: a single HTML file that needs no network; one that is there is replaced, whole or not at all.
        against: other plans of the same kind for the same model, by what the page calls them.
        frontier: the best choices for other budgets, to draw them; none beside a plan of tokens.
        profile: the latency table that the plan names; by default it is looked for among those that are shipped and
            saved, and without it the page does not say what the next dims would take.
        tokens: how many tokens each layer keeps beside the plan of weights, for the same model.
        name: what the page calls the plan.

    Returns:
        Where the page is.

    Raises:
        PlanError: a plan or the frontier is for another model or of another kind, or the frontier's losses are of
            another scale.
        ProfileError: the profile is not the one that the plan names.
        GacError: the file cannot be written.
    """
    check_one_kind((plan, *(against or {}).values()))
    opened = either(plan)
    if isinstance(opened, TokenPlan):
        if any(one is not None for one in (frontier, profile, tokens)):
            given = "a plan of tokens kept beside a frontier, a latency table or another plan of tokens"
            raise PlanError(given, "the plan, and other plans of tokens", "Leave the others out.")
        page = tokens_page(opened, name, TokenPlan.opened_each(against or {}))  # type: ignore[arg-type]
    else:
        others = Plan.opened_each(against or {})  # type: ignore[arg-type]
        points = None if frontier is None else Frontier.opened(frontier)
        table = profile_of(opened) if profile is None else Profile.opened(profile)
        kept = None if tokens is None else TokenPlan.opened(tokens)
        page = report_page(Sources(opened, name, others, points, table, kept))
    with complete_file(Path(output), "report") as temporary:
        temporary.write_bytes(page.encode())
    return Path(output)


def report_page(sources: Sources) -> str:
    """The page. Every name in it is escaped, and its content policy lets no request leave and no other script run."""
    return _filled("page.html", _content(sources))


def tokens_page(plan: TokenPlan, name: str = "plan", against: Mapping[str, TokenPlan] | None = None) -> str:
    """The page of a plan of tokens kept, likewise; it runs no script."""
    return _filled("tokens.html", of_tokens.content(plan, name, against or {}))


def _filled(template: str, content: Mapping[str, Any]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("gac.reporting.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    files = {name: Path(__file__).with_name(f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    hashes = {f"{name}_hash": _hash(content) for name, content in files.items()}
    return environment.get_template(template).render(**files, **hashes, **content)


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _content(sources: Sources) -> dict[str, Any]:
    plan, (columns, rows) = sources.plan, tables.heat_map(sources)
    cells, drawn = [cell for row in rows.values() for cell in row if cell], charts(sources)
    return {
        "sources": sources,
        "plan": plan,
        "kept": what_is_kept(plan),
        "summary": summary.summary(plan),
        "tiles": summary.tiles(plan),
        "columns": columns,
        "rows": rows,
        "cells": [{"label": cell.label, "facts": cell.facts, "reasons": cell.reasons} for cell in cells],
        "legend": legend_of(plan),
        "stayed": tables.stayed_dense(plan),
        "about_dense": tables.about_dense(plan),
        "charts": drawn,
        "called": {column: f"the {name}" for column, name in SIZES.items()},
        "fused": any(mark.letter == "F" for chart in drawn for mark in chart.marks),
        "size": (WIDTH, HEIGHT),
        "frame": {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        "alike": all(comparison.same_prediction for comparison in sources.comparisons.values()),
        "plans": tables.plans_table(sources),
        "sites": tables.sites_table(plan),
        "forms": [list(dict.fromkeys(weight.form for weight in site.weights)) for site in plan.sites],
        "sizes": reasons.sizes(plan),
        "certificate": summary.certificate(plan),
        "provenance": summary.provenance(sources),
        "commands": summary.commands(sources),
        "tokens": of_tokens.beside(sources.tokens, plan) if sources.tokens else None,
    }
