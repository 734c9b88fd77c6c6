"""Evaluated and timed models side by side as rich tables, at most 100 columns wide; nothing is printed here."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from gac.evaluation.results import Evaluated, Evaluation, OnText, TaskScore
from gac.reporting.formatting import legend, new_table

if TYPE_CHECKING:
    from gac.evaluation.bench import Result
    from gac.evaluation.latency import Timed

_COLUMNS = ("parameters", "dtype", "perplexity", "ratio", "ln ratio", "KL", "top-1")
_BENCH = (
    "ms: median of a run; IQR in % of it; over dense: speed over the dense model with fused weights, timed in the same "
    "rounds;\npredicted: from the latency table, in % beside what was measured; loss: nats a token"
)


# --- perplexity and tasks -------------------------------------------------------------------------------------------


def perplexity_table(result: Evaluation) -> Group:
    """One row a model: perplexity, what is lost, what its plan predicted, and how it diverges from the dense one.

    Where there are several texts, a row for each of them below the model's.
    """
    everyone = _everyone(result)
    rows = [row for model in everyone for row in _rows(result, model)]
    shown = ["", *(column for column in _COLUMNS if any(column in row for row in rows))]
    columns = ((column, ">" if column else "<") for column in shown)
    table = new_table(columns, [[row.get(column, "") for column in shown] for row in rows])
    measured = [one.perplexity for one in everyone[0].texts]
    notes = [f"{one.protocol}\n{one.tokens:,} tokens predicted" for one in measured]
    if result.against is not None and any(model.divergence for model in result.models):
        notes.append(
            f"KL: of the model from {result.against.name}, mean nats a token; top-1: tokens where both agree on the "
            "likeliest"
        )
    return Group(table, legend("\n".join(notes))) if notes else Group(table)


def _everyone(result: Evaluation) -> list[Evaluated]:
    """The model that the others are compared with comes first."""
    return [*([] if result.against is None else [result.against]), *result.models]


def _rows(result: Evaluation, model: Evaluated) -> Iterator[dict[str, str]]:
    """The model's row, what its plan predicted, and where there are several texts a row for each in between."""
    row = {"": model.name, "parameters": f"{model.parameters:,}", "dtype": model.dtype}
    several = len(model.texts) > 1
    if several or not model.texts:
        yield row
    for at, on_text in enumerate(model.texts):
        figures = _figures(on_text, result.log_ratio(model, at), model is result.against)
        yield ({"": f"  on {Path(on_text.perplexity.text).name}"} if several else row) | figures
        if perplexity := result.predicted_perplexity(model, at):
            yield {"": "  predicted by its plan", **_change(perplexity, model.predicted)}


def _figures(found: OnText, log_ratio: float | None, is_dense: bool) -> dict[str, str]:
    row = _change(found.perplexity.value, log_ratio)
    if is_dense:
        row |= {"ratio": "1", "ln ratio": "0"}
    if found.divergence is not None:
        row |= {"KL": f"{found.divergence.kl:.4f}", "top-1": f"{found.divergence.top1:.1%}"}
    return row


def _change(perplexity: float, log_ratio: float | None) -> dict[str, str]:
    ratio = {} if log_ratio is None else {"ratio": f"{exp(log_ratio):.4f}", "ln ratio": f"{log_ratio:.4f}"}
    return {"perplexity": f"{perplexity:.3f}", **ratio}


def task_table(result: Evaluation) -> Group:
    """One row a metric of a task, one column a model; a score with its standard error."""
    everyone = _everyone(result)
    scores = [{(score.task, score.metric): score for score in model.scores} for model in everyone]
    columns = [("task", "<"), ("metric", "<"), ("shots", ">"), *((model.name, ">") for model in everyone)]
    rows = [
        (*key, "" if first.num_fewshot is None else str(first.num_fewshot), *(_score(of[key]) for of in scores))
        for key, first in scores[0].items()
    ]
    sizes = {one.task: f"{_count(one)} of {one.task} {one.version}".rstrip() for one in everyone[0].scores}
    words = f"{', '.join(sizes.values())}; by {everyone[0].scores[0].harness}; ±: standard error"
    return Group(new_table(columns, rows), legend(words))


def _score(score: TaskScore) -> str:
    return f"{score.value:.4f}" if score.stderr is None else f"{score.value:.4f} ± {score.stderr:.4f}"


def _count(score: TaskScore) -> str:
    items = f"{score.items:,}"
    return f"{items} items" if score.items == score.total else f"the first {items} of {score.total:,} items"


# --- latency --------------------------------------------------------------------------------------------------------


def latency_table(results: "Sequence[Result]", total: int) -> Group:
    """One table a workload.

    Args:
        total: parameters of the dense targeted weights.
    """
    groups = groupby(results, key=lambda one: one.timed.workload)
    tables = [_of_workload(name, [(one.timed.name, benched(one, total)) for one in group]) for name, group in groups]
    return Group(*tables, legend(_BENCH))


def timed_table(results: "Sequence[Timed]") -> Group:
    """One table a workload; speeds are over the first model of each."""
    tables = []
    for workload, group in groupby(results, key=lambda one: one.workload):
        models = list(group)
        first = models[0].latency.median_ns
        rows = [(one.name, _timed(one, speed=f"{first / one.latency.median_ns:.3f}x")) for one in models]
        tables.append(_of_workload(workload, rows))
    return Group(*tables, legend("ms: median of a run; IQR in % of it; speed: over the first model's"))


def _of_workload(workload: str, rows: Sequence[tuple[str, dict[str, str]]]) -> Table:
    columns = [(workload, "<"), *((column, ">") for column in rows[0][1])]
    return new_table(columns, [(name, *figures.values()) for name, figures in rows])


def benched(one: "Result", total: int) -> dict[str, str]:
    """The figures of a version by the column that they stand in."""
    predicted = "" if one.error is None else f"{one.error:+.1%}"
    speed = {"over dense": f"{one.speedup:.3f}x", "predicted": predicted}
    return {"kept": f"{one.params / total:.4f}", "loss": f"{one.loss:.4f}", **_timed(one.timed, **speed)}


def _timed(one: "Timed", **speed: str) -> dict[str, str]:
    spread = one.latency
    return {
        "ms": f"{spread.median_ns / 1e6:.3f}",
        "IQR": f"{spread.iqr_ns / spread.median_ns:.1%}",
        **speed,
        "tokens/s": f"{one.tokens_per_second:,.0f}",
        "GB": f"{one.memory_bytes / 1e9:.2f}",
    }
