"""Commands that show plans: side by side, and as a page."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import gac
from gac.cli.command import Answer, Command, plan_document
from gac.cli.options import FILE, Target, named, option, profile_option, several
from gac_extensions.tokens.commands import tokens_document


@click.command(cls=Command)
@click.argument("files", metavar="A.json B.json [C.json ...]", nargs=-1, type=FILE)
def compare(files: tuple[Path, ...]) -> Answer:
    """Compare plans for one model.

    One row a plan: the parameters kept and the excess over the limit, the perplexity predicted on calibration text, the
    latency predicted for each workload, and the share of chosen dims that are multiples of 8. For two plans, the
    weights that differ most as well. Plans of gac tokens are compared with each other: tokens, loss, memory, latency.
    """
    from gac.reporting.tables import comparison_table, differences_table
    from gac_extensions.tokens import plan as token_plans

    if len(files) < 2:
        raise click.UsageError("Name two plans or more.")
    names = named(files)
    plans: dict[str, Any] = dict(zip(names, token_plans.load_plans(files), strict=True))
    first, *others = plans.values()
    of_tokens = isinstance(first, gac.TokenPlan)
    describe = tokens_document if of_tokens else plan_document
    entries = [{"path": str(path)} | describe(plans[name]) for name, path in names.items()]
    document: dict[str, Any] = {"plans": entries}
    if of_tokens:
        token_plans.check_comparable(plans)
        differences = [token_plans.differences_table(plans)] if len(plans) == 2 else []
        return Answer(document, lambda: [token_plans.comparison_table(plans), *differences])
    comparisons = [first.compare(plan) for plan in others]
    tables: list[Any] = [comparison_table(list(plans.items()))]
    if len(comparisons) == 1:
        document["differences"] = [asdict(difference) for difference in comparisons[0].differences]
        tables.append(differences_table(comparisons[0]))
    return Answer(document, lambda: tables)


@click.command(cls=Command)
@click.argument("plan_file", metavar="PLAN", type=FILE)
@several("--against", "Another plan for the same model, to compare with.", FILE, "PLAN")
@option("--frontier frontier_file", "Draw the best choices for other budgets; from gac frontier.", FILE, "FILE")
@option("--tokens", "A plan of tokens for the same model, to show with it; from gac tokens.", FILE, "TOKENS")
@option("--measured", "Show what was measured of the model too; from gac eval --against -o.", FILE, "FILE")
@profile_option("The latency table that the plan names. Default: look it up among those that gac profiles lists.")
@option("-o --output", "The page to write; an existing file is replaced.", Target(), default="report.html")
def report(
    plan_file: Path,
    against: tuple[Path, ...],
    frontier_file: Path | None,
    tokens: Path | None,
    measured: Path | None,
    profile: str | None,
    output: Path,
) -> Answer:
    """Write one page about PLAN: the choice for every weight and its reasons, the proof, how to make it again.

    For a plan of gac tokens: the tokens that every layer keeps, and the loss of each budget. The page is a single HTML
    file that needs no network.
    """
    from gac_extensions.tokens.plan import load_plans

    paths = named((plan_file, *against))
    (name, *names), (plan, *others) = paths, load_plans(paths.values())
    plans: Any = dict(zip(names, others, strict=True))
    shown: dict[str, Any] = {"frontier": frontier_file, "profile": profile, "tokens": tokens, "measured": measured}
    gac.report(plan, output, against=plans, name=name, **shown)
    counts = {"layers": len(plan.layers)} if isinstance(plan, gac.TokenPlan) else {"sites": len(plan.sites)}
    size = output.stat().st_size
    return Answer({"path": str(output), "bytes": size} | counts, lambda: [f"saved as {output}, {size / 1e3:,.0f} kB"])
