"""The command that says which constraints a dim breaks."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from gac.cli.options import LARGEST, shape_option
from gac.cli.verb import Answer, Verb

if TYPE_CHECKING:
    from gac.lab.mechanisms import Explanation, Finding, Ran


@click.command(cls=Verb, resume="Nothing was written; run it again.")
@click.argument("operator")
@click.argument("dim", type=click.IntRange(min=1, max=LARGEST))
@click.option(
    "--axis", metavar="AXIS", help="The axis that the dim belongs to. Default: the one that compression changes."
)
@shape_option
@click.option("--dtype", default="bf16", show_default=True, help="bf16, fp16 or fp8.")
@click.option("--profile", "name", metavar="NAME|FILE", help="Take costs and kernels from this latency table.")
def explain(operator: str, dim: int, axis: str | None, shape: dict[str, int], dtype: str, name: str | None) -> Answer:
    """Say which constraints a dim breaks, what each costs, and what ran there.

    OPERATOR is linear, low_rank, sdpa, ...; DIM is the size of one of its axes: a rank, a head_dim, a width. Without
    --profile the rules of every architecture are listed, with costs that others published.
    """
    from gac.lab.mechanisms.explain import explain as look_up
    from gac.lab.tables import explanation_tables
    from gac.profiling.table import Profile

    measured = None if name is None else Profile.load(name)
    told = look_up(operator, dim, measured, axis, shape or None, dtype)
    return Answer(_document(told), lambda: explanation_tables(told))


def _document(told: "Explanation") -> dict[str, Any]:
    names = ("operator", "axis", "dim", "dtype", "gpu", "compute_capability", "latency_ns", "summary")
    return {name: getattr(told, name) for name in names} | {
        "fixed": dict(told.fixed),
        "ran": [_ran(ran) for ran in told.ran],
        "collapse": None if told.collapse is None else asdict(told.collapse),
        "rules": [_finding(finding) for finding in told.findings],
    }


def _ran(ran: "Ran") -> dict[str, Any]:
    counts = {name: getattr(ran, name) for name in ("grid", "tiles", "waves", "last_wave", "exact")}
    return asdict(ran.kernel) | counts


def _finding(finding: "Finding") -> dict[str, Any]:
    rule = finding.rule
    return {
        "rule": rule.name,
        "level": rule.level,
        "constraint": rule.constraint,
        "since": rule.since,
        "before": rule.before,
        "sources": [asdict(source) for source in rule.sources],
        "holds": finding.holds,
        "detail": finding.detail,
        "below": finding.below,
        "above": finding.above,
        "cost": None if finding.cost is None else asdict(finding.cost),
    }
