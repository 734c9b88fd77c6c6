"""The command that checks models: perplexity, divergence and tasks of one or several models."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.files import plan_document
from gac.cli.measuring import tokenizer_named, tokenizer_option
from gac.cli.verb import Answer, Verb, document_option, note

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gac.evaluation.results import Evaluated, Evaluation

_TEXT = "wiki-sample"


def _names(_ctx: click.Context, _option: click.Parameter, text: str | None) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")] if text is not None else []
    if not all(names):
        raise click.BadParameter(f"{text!r} is not like hellaswag,piqa or task.yaml.")
    return tuple(names)


@click.command("eval", cls=Verb)
@click.argument("models", metavar="MODEL_OR_DIR...", nargs=-1, required=True)
@click.option(
    "--text",
    metavar="TEXT",
    help=f"wiki-sample, wikitext2, c4 or a file. Default: {_TEXT}; no text if --tasks is given.",
)
@click.option("--windows", type=click.IntRange(min=1), help="How many windows to read. Default: all of the text.")
@click.option(
    "--length",
    type=click.IntRange(min=2),
    help="Tokens in a window. Default: 2048 for wikitext2 and c4, as in published figures, else 1024.",
)
@click.option("--against", metavar="MODEL", help="Compare with this model, usually the dense one, on the same tokens.")
@click.option(
    "--kl/--no-kl",
    default=True,
    show_default=True,
    help="With --against: measure KL divergence and top-1 agreement too. Needs both models in memory.",
)
@click.option(
    "--tasks",
    callback=_names,
    metavar="NAME|FILE,...",
    help="Tasks of lm-evaluation-harness, such as hellaswag,piqa, or YAML files of local tasks.",
)
@click.option("--num-fewshot", type=click.IntRange(min=0), help="Examples before every item. Default: the task's own.")
@click.option("--limit", type=click.IntRange(min=1), help="Score only the first N items of each task. Default: all.")
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Windows, and requests of a task, that run together.",
)
@tokenizer_option
@document_option
def evaluate(models: tuple[str, ...], text: str | None, tokenizer: str | None, **how: Any) -> Answer:
    """Measure models on text that no calibration uses, and on tasks, side by side.

    MODEL_OR_DIR is a directory (dense or compressed), a hub id, or smollm2; several are measured alike, one after the
    other. With --against, what a compressed model's plan predicted is set beside what is measured.
    """
    text = _TEXT if text is None and not how["tasks"] else text
    from gac.sensitivity.text import check_text

    if text is not None:
        check_text(text)
    note(_plan_of_work(text, how))
    result = gac.evaluate(models, text=text, tokenizer=tokenizer_named(tokenizer), **how)
    return Answer(_document(result), lambda: _tables(result))


def _plan_of_work(text: str | None, how: dict[str, Any]) -> str:
    from gac.sensitivity.text import window_length

    many = f"{how['windows']:,}" if how["windows"] else "all"
    parts = [f"{many} windows of {how['length'] or window_length(text):,} tokens of {text}"] if text else []
    parts += [f"the tasks {', '.join(how['tasks'])}"] if how["tasks"] else []
    return f"on each model {' and '.join(parts)}"


def _document(result: "Evaluation") -> dict[str, Any]:
    document: dict[str, Any] = {"models": [_figures(result, model) for model in result.models]}
    return document if result.against is None else document | {"against": _figures(result, result.against)}


def _figures(result: "Evaluation", model: "Evaluated") -> dict[str, Any]:
    """What was measured of a model, without what was not, and the ratios that follow."""
    from math import exp

    document = asdict(replace(model, plan=None))
    document = {key: value for key, value in document.items() if value not in (None, ())}
    log_ratio = result.log_ratio(model)
    if log_ratio is not None and model is not result.against:
        document |= {"ratio": exp(log_ratio), "log_ratio": log_ratio}
    if model.predicted is not None:
        document["predicted_perplexity"] = result.predicted_perplexity(model)
    return document if model.plan is None else document | {"plan": plan_document(model.plan)}


def _tables(result: "Evaluation") -> list["RenderableType"]:
    from gac.reporting.evaluation import perplexity_table, task_table
    from gac.reporting.tables import plan_line

    tables: list[RenderableType] = [perplexity_table(result)]
    if result.models[0].scores:
        tables.append(task_table(result))
    plan = result.models[0].plan
    return [*tables, plan_line(plan)] if plan is not None and len(result.models) == 1 else tables
