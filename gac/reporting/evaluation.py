"""Evaluated models side by side as rich tables, at most 100 columns wide; nothing is printed here."""

from collections.abc import Iterable
from math import exp

from rich.console import Group

from gac.evaluation.results import Evaluated, Evaluation, Perplexity, TaskScore
from gac.reporting.layout import legend, new_table


def perplexity_table(result: Evaluation) -> Group:
    """One row a model: perplexity, what is lost, what its plan predicted, and how it diverges from the dense one."""
    rows = [_figures(result, model) for model in _everyone(result)]
    measured = [model.perplexity for model in _everyone(result) if model.perplexity is not None]
    shown = [column for column in _COLUMNS if any(column in row for row in rows)]
    table = new_table([("", "<"), *((column, ">") for column in shown)])
    for model, row in zip(_everyone(result), rows, strict=True):
        table.add_row(model.name, *(row.get(column, "") for column in shown))
        if predicted := _predicted(result, model):
            table.add_row("  predicted by its plan", *(predicted.get(column, "") for column in shown))
    notes = _reading(result, measured)
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


def _predicted(result: Evaluation, model: Evaluated) -> dict[str, str]:
    perplexity = result.predicted_perplexity(model)
    return {} if perplexity is None else _change(perplexity, model.predicted)


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
    table = new_table([("task", "<"), ("metric", "<"), ("shots", ">"), *((model.name, ">") for model in everyone)])
    for task, metric in scores[0]:
        of_models = [of_model[task, metric] for of_model in scores]
        shots = of_models[0].num_fewshot
        table.add_row(task, metric, "" if shots is None else str(shots), *map(_score, of_models))
    return Group(table, legend(_items(scores[0].values())))


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
