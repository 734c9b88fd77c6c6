"""Evaluated and timed models side by side, as tables."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group

from gac.core.display import Table
from gac.core.rich_tables import legend, stacked
from gac.evaluation.results import Evaluated, Evaluation, TaskScore

if TYPE_CHECKING:
    from gac.evaluation.latency import Timed

_COLUMNS = ("parameters", "dtype", "perplexity", "ratio", "ln ratio", "KL", "top-1")


def perplexity_table(result: Evaluation) -> Table:
    """One row a model: perplexity, its ratio to the dense one, the plan's prediction, and the divergence from dense.

    Where there are several texts, a row for each of them below the model's, and one for the geometric mean of the
    ratios.
    """
    models = result.all_models
    rows = [row for model in models for row in _rows(result, model)]
    shown = ["", *(column for column in _COLUMNS if any(column in row for row in rows))]
    measured = [text.perplexity for text in models[0].texts]
    notes = [f"{perplexity.protocol}\n{perplexity.tokens:,} tokens predicted" for perplexity in measured]
    if result.against is not None and any(model.divergence for model in result.models):
        notes.append(
            f"KL: of the model from {result.against.name}, mean nats a token; top-1: tokens where both agree on the "
            "likeliest"
        )
    notes += _elsewhere(result)
    columns = [(column, ">" if column else "<") for column in shown]
    return Table(columns, [[row.get(column, "") for column in shown] for row in rows], notes="\n".join(notes))


def _rows(result: Evaluation, model: Evaluated) -> Iterator[dict[str, str]]:
    row = {"": model.name, "parameters": f"{model.parameters:,}", "dtype": model.dtype}
    several = len(model.texts) > 1
    if several or not model.texts:
        yield row
    for number, text in enumerate(model.texts):
        figures = _change(text.perplexity.value, result.log_ratio(model, number))
        if model is result.against:
            figures |= {"ratio": "1", "ln ratio": "0"}
        if text.divergence is not None:
            figures |= {"KL": f"{text.divergence.kl:.4f}", "top-1": f"{text.divergence.top1:.1%}"}
        yield ({"": f"  on {Path(text.perplexity.text).name}"} if several else row) | figures
        if perplexity := result.predicted_perplexity(model, number):
            before = " before healing" if model.plan is not None and model.plan.healed else ""
            yield {"": f"  predicted by its plan{before}", **_change(perplexity, result.predicted_loss(model, number))}
    if several and result.against is not None and model is not result.against:
        yield {"": "  geometric mean", **_ratio(result.mean_log_ratio(model))}


def _change(perplexity: float, log_ratio: float | None) -> dict[str, str]:
    return {"perplexity": f"{perplexity:.3f}", **_ratio(log_ratio)}


def _ratio(log_ratio: float | None) -> dict[str, str]:
    return {} if log_ratio is None else {"ratio": f"{exp(log_ratio):.4f}", "ln ratio": f"{log_ratio:.4f}"}


def _elsewhere(result: Evaluation) -> Iterator[str]:
    """A note for each prediction of a text that is not among those measured."""
    for model in result.models:
        shown = any(result.predicted_perplexity(model, text) for text in range(len(model.texts)))
        if model.plan is not None and model.predicted is not None and not shown:
            text = model.plan.measured.calibration
            yield f"{model.name}: its plan predicts a ln ratio of {model.predicted:.4f} on {text}"


def task_table(result: Evaluation) -> Table:
    models = result.all_models
    scores = [{(score.task, score.metric): score for score in model.scores} for model in models]
    columns = [("task", "<"), ("metric", "<"), ("shots", ">"), *((model.name, ">") for model in models)]
    rows = [
        (*key, "" if first.num_fewshot is None else str(first.num_fewshot), *(_score(each[key]) for each in scores))
        for key, first in scores[0].items()
    ]
    sizes = {score.task: f"{_count(score)} of {score.task} {score.version}".rstrip() for score in models[0].scores}
    notes = f"{', '.join(sizes.values())}; by {models[0].scores[0].harness}; ±: standard error"
    return Table(columns, rows, notes=notes)


def _score(score: TaskScore) -> str:
    return f"{score.value:.4f}" if score.stderr is None else f"{score.value:.4f} ± {score.stderr:.4f}"


def _count(score: TaskScore) -> str:
    items = f"{score.items:,}"
    return f"{items} items" if score.items == score.total else f"the first {items} of {score.total:,} items"


def timed_table(results: "Sequence[Timed]") -> Group:
    """One table a workload; speeds are over the first model of each."""
    tables = []
    for workload, group in groupby(results, key=lambda timed: timed.workload):
        models = list(group)
        first = models[0].latency.median_ns
        rows = {timed.name: timing_cells(timed, speed=f"{first / timed.latency.median_ns:.3f}x") for timed in models}
        tables.append(table_by_name(workload, rows))
    return stacked([*tables, legend("ms: median of a run; IQR in % of it; speed: over the first model's")])


def table_by_name(heading: str, rows: dict[str, dict[str, str]]) -> Table:
    """Figures by row and then by column, under the heading of the rows' names."""
    columns = [(heading, "<"), *((column, ">") for column in next(iter(rows.values())))]
    return Table(columns, [(name, *figures.values()) for name, figures in rows.items()])


def timing_cells(timed: "Timed", **speed: str) -> dict[str, str]:
    """One row's figures by column; ``speed`` adds columns behind the spread."""
    spread = timed.latency
    return {
        "ms": f"{spread.median_ns / 1e6:.3f}",
        "IQR": f"{spread.iqr_ns / spread.median_ns:.1%}",
        **speed,
        "tokens/s": f"{timed.tokens_per_second:,.0f}",
        "GB": f"{timed.memory_bytes / 1e9:.2f}",
    }
