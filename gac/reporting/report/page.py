"""The page of a plan, as Python asks for it."""

from collections.abc import Mapping
from pathlib import Path

from gac.allocation.frontier import Frontier
from gac.plan import Plan
from gac.profiling.table import Profile
from gac.reporting.report.render import write_report
from gac.reporting.report.sources import Named, Sources, profile_of


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
