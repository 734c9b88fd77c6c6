"""Evaluated models side by side as rich tables, at most 100 columns wide; nothing is printed here."""

from collections.abc import Iterable
from math import exp

from rich.console import Group

from gac.evaluation.results import Evaluated, Evaluation, Perplexity, TaskScore
from gac.reporting.layout import legend, new_table


def perplexity_table(result: Evaluation) -> Group:
    """One row a model: perplexity, what is lost, what its plan predicted, and how it diverges from the dense one."""
    rows = []
    for model in _everyone(result):
        rows.append({"": model.name, **_figures(result, model)})
        if perplexity := result.predicted_perplexity(model):
            rows.append({"": "  predicted by its plan", **_change(perplexity, model.predicted)})
    shown = ["", *(column for column in _COLUMNS if any(column in row for row in rows))]
    columns = ((column, ">" if column else "<") for column in shown)
    table = new_table(columns, [[row.get(column, "") for column in shown] for row in rows])
    notes = _reading(result, [model.perplexity for model in _everyone(result) if model.perplexity is not None])
    return Group(table, legend("\n".join(notes))) if notes else Group(table)


_COLUMNS = ("parameters", "dtype", "perplexity", "ratio", "ln ratio", "KL", "top-1")


def _everyone(result: Evaluation) -> list[Evaluated]:
    """The model that the others are compared with comes first."""
    return [*([] if result.against is None else [result.against]), *result.models]


def _figures(result: Evaluation, model: Evaluated) -> dict[str, str]:
    row = {"parameters": f"{model.parameters:,}", "dtype": model.dtype}
    if model.perplexity is not None:
        row |= _change(model.perplexity.value, result.log_ratio(model), same=model is result.against)
    if model.divergence is not None:
        row |= {"KL": f"{model.divergence.kl:.4f}", "top-1": f"{model.divergence.top1:.1%}"}
    return row


def _change(perplexity: float, log_ratio: float | None, same: bool = False) -> dict[str, str]:
    row = {"perplexity": f"{perplexity:.3f}"}
    if same:
        return row | {"ratio": "1", "ln ratio": "0"}
    return row if log_ratio is None else row | {"ratio": f"{exp(log_ratio):.4f}", "ln ratio": f"{log_ratio:.4f}"}


def _reading(result: Evaluation, measured: list[Perplexity]) -> list[str]:
    notes = [f"{measured[0].protocol}\n{measured[0].tokens:,} tokens predicted"] if measured else []
    if result.against is not None and any(model.divergence for model in result.models):
        notes.append(
            f"KL: of the model from {result.against.name}, mean nats a token; top-1: tokens where both agree on the "
            "likeliest"
        )
    return notes


def task_table(result: Evaluation) -> Group:
    """One row a metric of a task, one column a model; a score with its standard error."""
    everyone = _everyone(result)
    scores = [{(score.task, score.metric): score for score in model.scores} for model in everyone]
    columns = [("task", "<"), ("metric", "<"), ("shots", ">"), *((model.name, ">") for model in everyone)]
    rows = [
        (*key, "" if first.num_fewshot is None else str(first.num_fewshot), *(_score(of[key]) for of in scores))
        for key, first in scores[0].items()
    ]
    return Group(new_table(columns, rows), legend(_items(scores[0].values())))


def _score(score: TaskScore) -> str:
    return f"{score.value:.4f}" if score.stderr is None else f"{score.value:.4f} ± {score.stderr:.4f}"


def _items(scores: Iterable[TaskScore]) -> str:
    """How many items of each task, and by what they were scored."""
    sizes = {score.task: f"{_count(score)} of {score.task} {score.version}".rstrip() for score in scores}
    harness = next(iter(scores)).harness
    return f"{', '.join(sizes.values())}; by {harness}; ±: standard error"


def _count(score: TaskScore) -> str:
    items = f"{score.items:,}"
    return f"{items} items" if score.items == score.total else f"the first {items} of {score.total:,} items"
