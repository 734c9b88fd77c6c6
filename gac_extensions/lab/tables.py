"""Studies and explanations of a dim as rich tables, at most 100 columns wide."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gac.core.display import Table
from gac.core.rich_tables import legend, new_table
from gac_extensions.lab.mechanisms import Explanation, Run
from gac_extensions.lab.studies import StudyResult

HEADING_WIDTH = 13  # characters of a line of a heading; a longer word keeps its line

_HOLDS = {True: "kept", False: "BROKEN", None: "?"}
_RULES = """\
?: the dim alone does not tell, the recorded kernels do; nearest: the dims below and above that keep the rule"""


def studies_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    rows = [(entry["name"], entry["claim"], f"{entry['shapes']:,}") for entry in entries]
    notes = "gac study NAME measures and judges; gac study NAME --profile P judges what is recorded"
    return Table([("study", "<"), ("published claim", "<"), ("shapes", ">")], rows, notes=notes)


def study_table(result: StudyResult) -> Group:
    headings = [(_heading(column.heading, column.unit), column.side) for column in result.columns]
    table = Table(headings, [tuple(map(_cell, row)) for row in result.rows], result.study)
    notes = f"published: {result.claim} ({result.source})", *result.notes
    return Group(table, Text(result.sentence, style="bold"), *map(legend, notes))


def verdicts_table(gpu: str, results: Sequence[StudyResult]) -> Table:
    rows = [(result.study, result.verdict, result.sentence) for result in results]
    return Table([("study", "<"), ("verdict", "<"), ("on this GPU", "<")], rows, gpu)


def _heading(heading: str, unit: str) -> str:
    lines = wrap(heading, HEADING_WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, f"({unit})"] if unit else lines)


def _cell(value: str | int | float | None) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return "-" if value is None else str(value)


# --- explanations of a dim ---


def explanation_tables(explanation: Explanation) -> list[RenderableType]:
    """One dim: a sentence, the kernels that ran, the rules, the cost of the broken ones, and the sources."""
    tables: list[RenderableType] = [Text(explanation.summary, style="bold")]
    if explanation.ran:
        sizes = " ".join(f"{axis}={size}" for axis, size in explanation.fixed)
        numbers = ((name, ">") for name in ("tier", "tile", "grid", "waves", "last"))
        table = new_table([("kernel", "<"), ("family", "<"), *numbers], map(_run_cells, explanation.ran))
        tables.append(Group(Text(f"recorded at {explanation.axis}={explanation.dim}, {sizes}"), table))
    if explanation.findings:
        tables += [Group(_rules_table(explanation), legend(_RULES)), *_costs(explanation), _sources(explanation)]
    return tables


def _run_cells(run: Run) -> tuple[str, ...]:
    kernel, waves = run.kernel, run.waves
    tile = "" if kernel.tile is None else "x".join(map(str, kernel.tile))
    tier = "" if kernel.tier is None else str(kernel.tier)
    count = "" if waves is None else f"{'' if waves.exact else '>='}{waves.count}"
    last = "" if waves is None or waves.last is None else f"{waves.last:.0%}"
    return kernel.label, kernel.family, tier, tile, "x".join(map(str, run.launch.grid)), count, last


def _rules_table(explanation: Explanation) -> RenderableType:
    table = new_table([("", "<"), ("rule", "<"), ("asks", "<"), ("here", "<"), ("nearest", ">"), ("since", ">")])
    for finding in explanation.findings:
        rule = finding.rule
        nearest = ", ".join(str(dim) for dim in (finding.below, finding.above) if dim is not None)
        since = f"sm_{rule.since.replace('.', '')}"
        row = (_HOLDS[finding.holds], rule.name, rule.constraint, finding.detail, nearest, since)
        table.add_row(*row, style="bold" if finding.holds is False else None)
    return table


def _costs(explanation: Explanation) -> list[Text]:
    costs: dict[str, list[str]] = {}  # one measured figure is the cost of several rules
    for finding in explanation.broken:
        if finding.cost is not None:
            costs.setdefault(finding.cost.words, []).append(finding.rule.name)
    return [Text(f"cost of {', '.join(names)}: {words}") for words, names in costs.items()]


def _sources(explanation: Explanation) -> Text:
    sources = (source for finding in explanation.broken or explanation.findings for source in finding.rule.sources)
    cited = (f"{source.author}, {source.title}, {source.section}\n  {source.url}" for source in sources)
    return legend("\n".join(dict.fromkeys(cited)))
