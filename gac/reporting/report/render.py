"""The page as one HTML file: a template filled, its style and script inside it, and nothing else allowed to run."""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gac.plan.costs import COSTS
from gac.plan.layers import legend_of
from gac.plan.summary import facts, what_is_kept
from gac.reporting.report import reasons, summary, tables
from gac.reporting.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, charts
from gac.reporting.report.sources import Sources


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
    cells, drawn = [cell for row in rows.values() for cell in row if cell], charts(sources)
    sites, keys = tables.sites_table(plan)
    return {
        "sources": sources,
        "plan": plan,
        "kept": what_is_kept(plan),
        "summary": [(label[0].upper() + label[1:], value) for label, value in facts(plan)],
        "tiles": summary.tiles(plan),
        "columns": columns,
        "rows": rows,
        "cells": [{"label": cell.label, "facts": cell.facts, "reasons": cell.reasons} for cell in cells],
        "legend": legend_of(plan),
        "stayed": tables.stayed_dense(plan),
        "about_dense": tables.about_dense(plan),
        "charts": drawn,
        "called": {name: f"the {cost.label}" for name, cost in COSTS.items()},
        "fused": any(mark.letter == "F" for chart in drawn for mark in chart.marks),
        "size": (WIDTH, HEIGHT),
        "frame": {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        "alike": all(comparison.same_prediction for comparison in sources.comparisons.values()),
        "plans": tables.plans_table(sources),
        "sites": sites,
        "keys": keys,
        "forms": [list(dict.fromkeys(weight.form for weight in site.weights)) for site in plan.sites],
        "sizes": reasons.size_noun(plan),
        "certificate": summary.certificate(plan),
        "provenance": summary.provenance(sources),
        "commands": summary.commands(sources),
        "tokens": sources.tokens,
    }
