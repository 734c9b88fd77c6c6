"""The command that compares plans for one model."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gac.cli.documents import names_of, plan_document
from gac.cli.verb import Answer, Verb

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gac.plan import Plan, PlanComparison


@click.command(cls=Verb, resume="Nothing was written; run it again.")
@click.argument("files", metavar="A.json B.json [C.json ...]", nargs=-1, type=click.Path(path_type=Path))
def compare(files: tuple[Path, ...]) -> Answer:
    """Compare plans for one model.

    One row a plan: the parameters kept and how many are over the limit, the perplexity predicted on calibration text,
    the latency predicted for each workload, and the share of chosen dims that are multiples of 8. For two plans, the
    weights that differ most as well.
    """
    if len(files) < 2:
        raise click.UsageError("Name two plans or more.")
    from gac.plan import Plan

    plans = [Plan.load(file) for file in files]
    comparisons = [plans[0].compare(plan) for plan in plans[1:]]
    pairs = list(zip(files, plans, strict=True))
    document: dict[str, Any] = {"plans": [{"path": str(file)} | plan_document(plan) for file, plan in pairs]}
    if len(comparisons) == 1:
        document["differences"] = [asdict(difference) for difference in comparisons[0].differences]
    return Answer(document, lambda: _tables(pairs, comparisons))


def _tables(pairs: Sequence[tuple[Path, "Plan"]], comparisons: Sequence["PlanComparison"]) -> list["RenderableType"]:
    from gac.reporting.plan_comparison import comparison_table, differences_table

    names = names_of([file for file, _ in pairs])
    named = [(name, plan) for name, (_, plan) in zip(names, pairs, strict=True)]
    differences = [differences_table(comparisons[0])] if len(comparisons) == 1 else []
    return [comparison_table(named), *differences]
