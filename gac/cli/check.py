"""The command that checks models: perplexity, divergence and tasks (eval)."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.command import Answer, Command, note, plan_document
from gac.cli.options import AT_LEAST_1, document_option, option, reject_options, several, switch, tokenizer_option
from gac.evaluation.sample_tasks import SAMPLE_TASKS, task_names
from gac.measurement.samples import SAMPLE_TEXTS, SAMPLE_WINDOWS, SAMPLES

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gac.evaluation.results import Evaluated, Evaluation


class _WindowCount(click.IntRange):
    name = "number, or all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "all" else super().convert(value, param, ctx)


def _names(_ctx: click.Context, _option: click.Parameter, text: str | None) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")] if text is not None else []
    if not all(names):
        raise click.BadParameter(f"{text!r} is not like hellaswag,piqa or task.yaml.")
    return tuple(names)


@click.command("eval", cls=Command)
@click.argument("models", metavar="MODEL_OR_DIR...", nargs=-1, required=True)
@several(
    "--text texts",
    f"{', '.join(SAMPLE_TEXTS)} ({SAMPLES}: these three), wikitext2, c4, chat, code or a file. Default: {SAMPLES}, or "
    "none with --tasks.",
    metavar="TEXT",
)
@option(
    "--windows",
    f"Windows to read of each text, in even steps. Default: at most {SAMPLE_WINDOWS} of each of the {SAMPLES}, all of "
    "other texts.",
    _WindowCount(min=1),
    "N|all",
)
@option("--length", "Tokens in a window. Default: 2048 for wikitext2 and c4, else 1024.", click.IntRange(min=2))
@switch(
    "--bos/--no-bos",
    "Begin every window with BOS, or none. Default: if the tokenizer adds it; in wikitext2 and c4 at the head alone.",
)
@option("--against", "Compare with this model, usually the dense one, on the same tokens.", metavar="MODEL")
@switch("--kl/--no-kl", "With --against: KL divergence and top-1 agreement; needs both in memory.", default=True)
@option(
    "--tasks",
    f"{', '.join(SAMPLE_TASKS)} ({SAMPLES}: these three), tasks of lm-evaluation-harness, or YAML files.",
    None,
    "NAME|FILE,...",
    callback=_names,
)
@option("--num-fewshot", "Examples before every item. Default: the task's own.", click.IntRange(min=0))
@option("--limit", "Score only the first N items of each task. Default: all.", AT_LEAST_1)
@option("--batch", "Windows, and requests of a task, in one batch.", AT_LEAST_1, default=1)
@tokenizer_option
@document_option
def evaluate(models: tuple[str, ...], texts: tuple[str, ...], **options: Any) -> Answer:
    """Measure models on text that no calibration uses, and on tasks, side by side.

    MODEL_OR_DIR is a directory (dense or compressed), a hub id, or a packaged model; several are measured alike, one
    after the other. With --against, the prediction of a compressed model's plan is shown with the measurement, on the
    text that it was calibrated on.
    """
    if not options["tasks"]:
        reject_options({"num_fewshot", "limit"}, "with --tasks.")
    if options["against"] is None:
        reject_options({"kl"}, "with --against.")
    texts = texts or (() if options["tasks"] else (SAMPLES,))
    if not texts:
        reject_options({"windows", "length", "bos"}, "with --text.")
    from gac.measurement.images import holds_messages
    from gac.measurement.text import check_text, window_length
    from gac.models.loading import load_tokenizer

    work = []
    for text in texts:
        if text != SAMPLES:
            check_text(text)
        count = options["windows"] or (f"at most {SAMPLE_WINDOWS}" if text == SAMPLES else "all")
        read = f"each of {', '.join(SAMPLE_TEXTS)}" if text == SAMPLES else text
        size = f"windows of {options['length'] or window_length(text):,} tokens"
        work.append(f"{count} {'examples' if holds_messages(text) else size} of {read}")
    work += [f"the tasks {', '.join(task_names(options['tasks']))}"] if options["tasks"] else []
    note(f"on each model {' and '.join(work)}")
    if options["tokenizer"]:
        options["tokenizer"] = load_tokenizer(options["tokenizer"])
    result = gac.evaluate(models, text=texts[0] if texts else None, also=texts[1:], **options)
    document: dict[str, Any] = {"models": [_figures(result, model) for model in result.models]}
    if result.against is not None:
        document["against"] = _figures(result, result.against)
    return Answer(document, lambda: _evaluation_tables(result))


def _evaluation_tables(result: "Evaluation") -> list["RenderableType"]:
    from gac.reporting.evaluation import perplexity_table, task_table
    from gac.reporting.tables import memory_table, plan_line

    tables: list[RenderableType] = [perplexity_table(result)]
    if result.models[0].scores:
        tables.append(task_table(result))
    planned = [(model.name, model.plan) for model in result.models if model.plan is not None]
    if len(result.models) == 1:
        tables += [plan_line(plan) for _, plan in planned]
    if planned and all(plan.measured.digest == planned[0][1].measured.digest for _, plan in planned):
        tables.append(memory_table(planned))
    return tables


def _figures(result: "Evaluation", model: "Evaluated") -> dict[str, Any]:
    """The measurements of a model, without those that were not made, and the ratios that follow."""
    from math import exp

    document = asdict(replace(model, plan=None))
    if model is not result.against and len(model.texts) > 1 and (mean := result.mean_log_ratio(model)) is not None:
        document |= {"mean_ratio": exp(mean), "mean_log_ratio": mean}
    for number, on_text in enumerate((document, *document["also"])):
        log_ratio = result.log_ratio(model, number)
        if log_ratio is not None and model is not result.against:
            on_text |= {"ratio": exp(log_ratio), "log_ratio": log_ratio}
        if model.predicted is not None:
            on_text["predicted_perplexity"] = result.predicted_perplexity(model, number)
    document["also"] = list(map(_without_empty, document["also"]))
    document = _without_empty(document)
    return document if model.plan is None else document | {"plan": plan_document(model.plan)}


def _without_empty(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if value is not None and value != () and value != []}
