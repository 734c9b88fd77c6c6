"""Measured latencies as rich tables and as Markdown; nothing is printed here."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group

from gac.evaluation.bench import Result
from gac.evaluation.latency import Timed
from gac.reporting.layout import legend, new_table

_COLUMNS = (
    ("", "<"),
    ("kept", ">"),
    ("loss", ">"),
    ("ms", ">"),
    ("IQR", ">"),
    ("over dense", ">"),
    ("predicted", ">"),
    ("tokens/s", ">"),
    ("GB", ">"),
)
_LEGEND = (
    "ms: median of a run; IQR in % of it; over dense: speed over the dense model with fused weights, timed in the same "
    "rounds;\npredicted: from the latency table, in % beside what was measured; loss: nats a token"
)


def latency_table(results: Sequence[Result], total: int) -> Group:
    """One table a workload.

    Args:
        total: parameters of the dense targeted weights.
    """
    tables: list[object] = []
    for workload, group in groupby(results, key=lambda one: one.timed.workload):
        table = new_table([(workload, "<"), *_COLUMNS[1:]])
        for one in group:
            table.add_row(*_cells(one, total))
        tables.append(table)
    return Group(*tables, legend(_LEGEND))  # type: ignore[arg-type]


def timed_table(results: Sequence[Timed]) -> Group:
    """One table a workload; speeds are over the first model of each."""
    tables: list[object] = []
    for workload, group in groupby(results, key=lambda one: one.workload):
        table = new_table([(workload, "<"), ("ms", ">"), ("IQR", ">"), ("speed", ">"), ("tokens/s", ">"), ("GB", ">")])
        rows = list(group)
        for one in rows:
            table.add_row(
                one.name,
                f"{one.latency.median_ns / 1e6:.3f}",
                f"{one.latency.iqr_ns / one.latency.median_ns:.1%}",
                f"{rows[0].latency.median_ns / one.latency.median_ns:.3f}x",
                f"{one.tokens_per_second:,.0f}",
                f"{one.memory_bytes / 1e9:.2f}",
            )
        tables.append(table)
    return Group(*tables, legend("ms: median of a run; IQR in % of it; speed: over the first model's"))  # type: ignore[arg-type]


def latency_markdown(results: Sequence[Result], total: int) -> Iterator[str]:
    """The lines of one Markdown table."""
    headings = ["contestant", *(heading for heading, _ in _COLUMNS[1:])]
    yield f"| {' | '.join(headings)} |"
    yield f"| --- |{' ---: |' * (len(headings) - 1)}"
    for one in results:
        yield f"| {' | '.join(_cells(one, total))} |"


def _cells(one: Result, total: int) -> tuple[str, ...]:
    spread = one.timed.latency
    return (
        one.timed.name,
        f"{one.params / total:.4f}",
        f"{one.loss:.4f}",
        f"{spread.median_ns / 1e6:.3f}",
        f"{spread.iqr_ns / spread.median_ns:.1%}",
        f"{one.speedup:.3f}x",
        "" if one.error is None else f"{one.error:+.1%}",
        f"{one.timed.tokens_per_second:,.0f}",
        f"{one.timed.memory_bytes / 1e9:.2f}",
    )
