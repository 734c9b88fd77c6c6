"""Studies beside what was published, and explanations of a dim, as rich tables, at most 100 columns wide."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gac.core.rich_tables import legend, new_table
from gac.lab.mechanisms import Explanation, Run
from gac.lab.studies import StudyResult

HEADING_WIDTH = 13
"""Characters of a line of a heading; a longer word keeps its line."""

_HOLDS = {True: "kept", False: "BROKEN", None: "?"}
_RULES = """\
?: the dim alone does not tell, the recorded kernels do; nearest: the dims below and above that keep the rule"""


def studies_table(entries: Sequence[Mapping[str, Any]]) -> Group:
    """The studies that there are: ``name``, ``claim``, and how many ``shapes`` each measures."""
    rows = [(entry["name"], entry["claim"], f"{entry['shapes']:,}") for entry in entries]
    table = new_table([("study", "<"), ("published claim", "<"), ("shapes", ">")], rows)
    return Group(
        table, legend("gac study NAME measures and judges; gac study NAME --profile P judges what is recorded")
    )


def study_tables(result: StudyResult) -> list[RenderableType]:
    """One study: its table, the sentence that says its verdict, the claim with its source, and the notes."""
    headings = [(_heading(column.heading, column.unit), column.side) for column in result.columns]
    table = new_table(headings, [tuple(map(_cell, row)) for row in result.rows])
    claim = legend(f"published: {result.claim} ({result.source})")
    notes = [legend(note) for note in result.notes]
    title = Text(result.study, style="bold")
    return [Group(title, table, Text(result.sentence, style="bold"), claim, *notes)]


def verdicts_table(gpu: str, results: Sequence[StudyResult]) -> Group:
    """One line a study: whether the published claim holds on this GPU."""
    rows = [(result.study, result.verdict, result.sentence) for result in results]
    table = new_table([("study", "<"), ("verdict", "<"), ("on this GPU", "<")], rows)
    return Group(Text(gpu, style="bold"), table)


def _heading(heading: str, unit: str) -> str:
    """Lines of few words, the unit on the last: eleven columns have to fit in."""
    lines = wrap(heading, HEADING_WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, f"({unit})"] if unit else lines)


def _cell(value: str | int | float | None) -> str:
    """Four significant figures, whole numbers whole, nothing where there is no figure."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)


# --- one dim --------------------------------------------------------------------------------------------------------


def explanation_tables(told: Explanation) -> list[RenderableType]:
    """What is known about one dim: a sentence, the kernels that ran, the rules, their cost and their sources."""
    tables: list[RenderableType] = [Text(told.summary, style="bold")]
    if told.ran:
        tables.append(_ran_table(told))
    if not told.findings:
        return tables
    tables.append(Group(_rules_table(told), legend(_RULES)))
    if told.broken:
        tables.append(_costs(told))
    return [*tables, _sources(told)]


def _ran_table(told: Explanation) -> Group:
    """The kernels recorded at the dim, in order."""
    numbers = ((name, ">") for name in ("tier", "tile", "grid", "waves", "last"))
    table = new_table([("kernel", "<"), ("family", "<"), *numbers], map(_ran_cells, told.ran))
    sizes = " ".join(f"{axis}={size}" for axis, size in told.fixed)
    return Group(Text(f"recorded at {told.axis}={told.dim}, {sizes}"), table)


def _ran_cells(ran: Run) -> tuple[str, ...]:
    kernel, waves = ran.kernel, ran.waves
    tile = "" if kernel.tile is None else "x".join(map(str, kernel.tile))
    tier = "" if kernel.tier is None else str(kernel.tier)
    count = "" if waves is None else f"{'' if waves.exact else '>='}{waves.count}"
    last = "" if waves is None or waves.last is None else f"{waves.last:.0%}"
    return kernel.label, kernel.family, tier, tile, "x".join(map(str, ran.launch.grid)), count, last


def _rules_table(told: Explanation) -> Table:
    table = new_table([("", "<"), ("rule", "<"), ("asks", "<"), ("here", "<"), ("nearest", ">"), ("since", ">")])
    for finding in told.findings:
        rule = finding.rule
        nearest = ", ".join(str(dim) for dim in (finding.below, finding.above) if dim is not None)
        since = f"sm_{rule.since.replace('.', '')}"
        row = (_HOLDS[finding.holds], rule.name, rule.constraint, finding.detail, nearest, since)
        table.add_row(*row, style="bold" if finding.holds is False else None)
    return table


def _costs(told: Explanation) -> Group:
    """What breaking the rules costs: what was measured is one figure for all of them together."""
    costs: dict[str, list[str]] = {}
    for finding in told.broken:
        if finding.cost is not None:
            costs.setdefault(finding.cost.words, []).append(finding.rule.name)
    return Group(*(Text(f"cost of {', '.join(names)}: {words}") for words, names in costs.items()))


def _sources(told: Explanation) -> Text:
    """Where the broken rules are documented (all rules, where none is broken)."""
    sources = (source for finding in told.broken or told.findings for source in finding.rule.sources)
    cited = (f"{source.author}, {source.title}, {source.section}\n  {source.url}" for source in sources)
    return legend("\n".join(dict.fromkeys(cited)))
