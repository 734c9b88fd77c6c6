"""The page as one HTML file: a template filled, its style and script inside it, and nothing else allowed to run."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gac.allocation.frontier import Frontier
from gac.io import whole_file
from gac.plan import Plan
from gac.profiling.table import Profile
from gac.reporting.report import summary
from gac.reporting.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, charts, letter_of
from gac.reporting.report.formatting import duration, nats
from gac.reporting.report.map import heat_map
from gac.reporting.report.sources import Named, Sources, profile_of
from gac.reporting.report.table import site_table
from gac.reporting.tables import legend_of


def report(
    plan: Plan,
    output: str | Path = "report.html",
    *,
    against: Mapping[str, Plan] | None = None,
    frontier: Frontier | None = None,
    profile: Profile | None = None,
    name: str = "plan",
) -> Path:
    """Write one page about a plan: what every weight becomes and why, the proof, how to make it again.

    Args:
        output: a single HTML file that needs no network; one that is there is replaced, whole or not at all.
        against: other plans for the same model, by what the page calls them.
        frontier: the best choices for other budgets, to draw them.
        profile: the latency table that the plan names; by default it is looked for among those that are shipped and
            saved, and without it the page does not say what the next dims would take.
        name: what the page calls the plan.

    Returns:
        Where the page is.

    Raises:
        PlanError: a plan or the frontier is for another model, or the frontier's losses are of another scale.
        ProfileError: the profile is not the one that the plan names.
        GacError: the file cannot be written.
    """
    others = tuple(Named(other, one) for other, one in (against or {}).items())
    write_report(Sources(Named(name, plan), others, frontier, profile or profile_of(plan)), Path(output))
    return Path(output)


def report_page(sources: Sources) -> str:
    """The page. Every name in it is escaped, and its content policy lets no request leave and no other script run."""
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
    return environment.get_template("page.html").render(**files, **hashes, **_content(sources))


def write_report(sources: Sources, path: Path) -> int:
    """Write the page, whole or not at all; returns its size in bytes.

    Raises:
        GacError: the path cannot be written.
    """
    content = report_page(sources).encode()
    with whole_file(path, "report") as temporary:
        temporary.write_bytes(content)
    return len(content)


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _content(sources: Sources) -> dict[str, Any]:
    plan, found = sources.plan.plan, heat_map(sources)
    return {
        "plan": plan,
        "name": sources.plan.name,
        "summary": summary.summary(sources),
        "tiles": _tiles(plan),
        "map": found,
        "legend": legend_of(plan),
        "cells": [{"label": cell.label, "facts": cell.facts, "reasons": cell.reasons} for cell in found.cells],
        "stayed": summary.stayed_dense(plan),
        "about_dense": summary.about_dense(plan),
        "nats": nats,
        "charts": charts(sources),
        "size": (WIDTH, HEIGHT),
        "frame": {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        "frontier": sources.frontier,
        "unlike": sources.unlike,
        "others": _others(sources),
        "alike": all(comparison.same_prediction for comparison in sources.comparisons),
        "table": site_table(plan),
        "certificate": summary.certificate(plan),
        "provenance": summary.provenance(sources),
        "commands": summary.commands(sources),
    }


def _tiles(plan: Plan) -> Sequence[tuple[str, str, str]]:
    """The figures that are looked for first: name, value, what it is beside."""
    budget, told, proof = plan.budget, plan.prediction, plan.certificate
    tiles = [
        ("Parameters kept", f"{budget.kept:.4f}", f"{budget.asked:g} asked"),
        ("Predicted perplexity", f"{told.perplexity:,.2f}", f"{told.dense_perplexity:,.2f} dense"),
    ]
    for one in plan.workloads:
        if one.dense_ns and one.plan_ns:
            tiles.append((one.workload, f"{one.plan_ns / one.dense_ns:.3f}x", f"{duration(one.dense_ns)} dense"))
        else:
            tiles.append((one.workload, "unknown", "shapes not in the table"))
    tiles.append(("Proof", proof.status, f"gap {proof.gap:.3g}"))
    return tiles


def _others(sources: Sources) -> Sequence[dict[str, Any]]:
    """One row a plan, the page's own first."""
    rows = [_beside("P", sources.plan.name, sources.plan.plan, None)]
    for at, (other, comparison) in enumerate(zip(sources.against, sources.comparisons, strict=True)):
        rows.append(_beside(letter_of(at), other.name, other.plan, len(comparison.differences)))
    return rows


def _beside(letter: str, name: str, plan: Plan, differing: int | None) -> dict[str, Any]:
    return {
        "letter": letter,
        "name": name,
        "kept": f"{plan.budget.kept:.4f}",
        "over": f"{plan.budget.over:,}",
        "loss": nats(plan.prediction.loss),
        "perplexity": f"{plan.prediction.perplexity:,.2f}",
        "latency": {one.workload: duration(one.plan_ns) for one in plan.workloads},
        "aligned": f"{plan.aligned_fraction:.1%}",
        "proof": plan.certificate.status,
        "differing": "" if differing is None else f"{differing:,}",
    }
