"""Measured latencies as rich tables and as Markdown; nothing is printed here."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group
from rich.table import Table

from gac.evaluation.bench import Result
from gac.evaluation.latency import Timed
from gac.reporting.layout import legend, new_table

_FIGURES = ("kept", "loss", "ms", "IQR", "over dense", "predicted", "tokens/s", "GB")
_LEGEND = (
    "ms: median of a run; IQR in % of it; over dense: speed over the dense model with fused weights, timed in the same "
    "rounds;\npredicted: from the latency table, in % beside what was measured; loss: nats a token"
)


def latency_table(results: Sequence[Result], total: int) -> Group:
    """One table a workload.

    Args:
        total: parameters of the dense targeted weights.
    """
    groups = groupby(results, key=lambda one: one.timed.workload)
    tables = [_table(workload, _FIGURES, [_cells(one, total) for one in group]) for workload, group in groups]
    return Group(*tables, legend(_LEGEND))


def timed_table(results: Sequence[Timed]) -> Group:
    """One table a workload; speeds are over the first model of each."""
    tables = []
    for workload, group in groupby(results, key=lambda one: one.workload):
        first, *others = group
        rows = [
            (one.name, *_spread(one), f"{first.latency.median_ns / one.latency.median_ns:.3f}x", *_rate(one))
            for one in (first, *others)
        ]
        tables.append(_table(workload, ("ms", "IQR", "speed", "tokens/s", "GB"), rows))
    return Group(*tables, legend("ms: median of a run; IQR in % of it; speed: over the first model's"))


def _table(workload: str, figures: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return new_table([(workload, "<"), *((figure, ">") for figure in figures)], rows)


def latency_markdown(results: Sequence[Result], total: int) -> Iterator[str]:
    """The lines of one Markdown table."""
    headings = ["version", *_FIGURES]
    yield f"| {' | '.join(headings)} |"
    yield f"| --- |{' ---: |' * (len(headings) - 1)}"
    for one in results:
        yield f"| {' | '.join(_cells(one, total))} |"


def _cells(one: Result, total: int) -> tuple[str, ...]:
    return (
        one.timed.name,
        f"{one.params / total:.4f}",
        f"{one.loss:.4f}",
        *_spread(one.timed),
        f"{one.speedup:.3f}x",
        "" if one.error is None else f"{one.error:+.1%}",
        *_rate(one.timed),
    )


def _spread(timed: Timed) -> tuple[str, str]:
    spread = timed.latency
    return f"{spread.median_ns / 1e6:.3f}", f"{spread.iqr_ns / spread.median_ns:.1%}"


def _rate(timed: Timed) -> tuple[str, str]:
    return f"{timed.tokens_per_second:,.0f}", f"{timed.memory_bytes / 1e9:.2f}"
