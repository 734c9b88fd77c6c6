"""Timed versions of a model beside the dense one, as tables."""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group

from gac.core.rich_tables import legend, stacked
from gac.reporting.evaluation import table_by_name, timing_cells
from gac_extensions.lab.shapes.bench import Result

_BENCH = (
    "ms: median of a run; IQR in % of it; over dense: speed over the dense model with fused weights, timed in the same "
    "rounds;\npredicted: from the latency table, in % beside what was measured; loss: nats a token"
)


def latency_table(results: Sequence[Result], total: int) -> Group:
    """One table a workload; ``total`` is the number of the dense targeted weights' parameters."""
    tables = []
    for workload, group in groupby(results, key=lambda result: result.timed.workload):
        tables.append(table_by_name(workload, {result.timed.name: benched(result, total) for result in group}))
    return stacked([*tables, legend(_BENCH)])


def benched(result: Result, total: int) -> dict[str, str]:
    predicted = "" if result.error is None else f"{result.error:+.1%}"
    speed = {"over dense": f"{result.speedup:.3f}x", "predicted": predicted}
    return {"kept": f"{result.params / total:.4f}", "loss": f"{result.loss:.4f}", **timing_cells(result.timed, **speed)}
