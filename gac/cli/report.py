"""The command that writes the page of a plan."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gac.cli.checks import check_file
from gac.cli.documents import names_of
from gac.cli.verb import Answer, Verb, note
from gac.errors import GacError

if TYPE_CHECKING:
    from gac.plan import Plan
    from gac.profiling.table import Profile


@click.command(cls=Verb, resume="Nothing was written; run it again.")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option(
    "--against",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="Another plan for the same model, to compare with. Repeatable.",
)
@click.option(
    "--frontier",
    "frontier_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the best choices for other budgets; made by gac frontier.",
)
@click.option(
    "--profile",
    "profile_name",
    metavar="NAME|FILE",
    help="The latency table that the plan names. Default: look it up among those that gac profiles lists.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The page to write; an existing file is replaced.",
)
def report(
    plan_file: Path, against: tuple[Path, ...], frontier_file: Path | None, profile_name: str | None, output: Path
) -> Answer:
    """Write one page about PLAN: what every weight becomes and why, the proof, how to make it again.

    The page is a single HTML file that needs no network.
    """
    check_file(output, GacError)
    from gac.allocation.frontier import Frontier
    from gac.plan import Plan
    from gac.reporting.report.render import write_report
    from gac.reporting.report.sources import Named, Sources

    files = (plan_file, *against)
    plan, *others = (Named(name, Plan.load(file)) for name, file in zip(names_of(files), files, strict=True))
    frontier = None if frontier_file is None else Frontier.load(frontier_file)
    sources = Sources(plan, tuple(others), frontier, _profile(plan.plan, profile_name))
    size = write_report(sources, output)
    document = {"path": str(output), "bytes": size, "sites": len(plan.plan.sites)}
    return Answer(document, lambda: [f"saved as {output}, {size / 1e3:,.0f} kB"])


def _profile(plan: "Plan", name: str | None) -> "Profile | None":
    from gac.profiling.table import Profile
    from gac.reporting.report.sources import profile_of

    if name is not None:
        return Profile.load(name)
    found = profile_of(plan)
    if found is None:
        digest = plan.measured.profile.digest[:12]
        note(f"the latency table {digest} is not at hand: the page will not say what the next dims would take")
    return found
