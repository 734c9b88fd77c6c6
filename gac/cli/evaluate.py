"""The command that checks a model: perplexity, alone or beside another model's on the same tokens."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gac.cli.checks import check_file, check_text
from gac.cli.documents import plan_document
from gac.cli.measuring import tokenizer_option
from gac.cli.verb import Answer, Verb, note
from gac.errors import GacError, ModelError
from gac.files import atomic_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gac.plan import Plan
    from gac.reporting.comparison import Comparison, Measured


@click.command("eval", cls=Verb, resume="Nothing was written; run it again.")
@click.argument("model", metavar="MODEL_OR_DIR")
@click.option(
    "--text", default="wiki-sample", show_default=True, metavar="TEXT", help="wiki-sample, wikitext2, c4 or a file."
)
@click.option("--windows", type=click.IntRange(min=1), help="How many windows; by default all that the text has.")
@click.option("--length", type=click.IntRange(min=2), default=1024, show_default=True, help="Tokens of a window.")
@click.option("--against", metavar="MODEL", help="Evaluate this one too (the dense one, say), on the same tokens.")
@tokenizer_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the JSON document to this file too.")
def evaluate(
    model: str, against: str | None, tokenizer: str | None, output: Path | None, text: str, **size: Any
) -> Answer:
    """Measure perplexity on text that no calibration uses.

    MODEL_OR_DIR is a directory (dense or compressed), a hub id, or smollm2. With --against, what a compressed
    model's plan predicted is set beside what is measured.
    """
    from gac.reporting.comparison import Comparison

    if output is not None:
        check_file(output, GacError)
    check_text(text)
    reader = _reader(model, against, tokenizer)
    many = f"{size['windows']:,}" if size["windows"] else "all"
    note(f"on each model {many} windows of {size['length']:,} tokens of {text}")
    opened = _open(model)
    plan = getattr(opened, "gac_plan", None)
    result = Comparison(_measure(model, opened, reader, text, size))
    del opened  # two models need not fit in memory together
    if against is not None:
        other = _open(against)
        reference = _measure(against, other, reader, text, size)
        result = Comparison(result.model, reference, _prediction(plan, against, other))
    document = _document(result, plan)
    if output is not None:
        _write(document, output)
    return Answer(document, lambda: _tables(result, plan))


def _open(name: str) -> "PreTrainedModel":
    """A dense model, or a directory that GAC wrote."""
    from gac.compression.checkpoint import load_checkpoint
    from gac.models.loading import is_checkpoint, load_model

    note(f"loading {name}")
    return load_checkpoint(name) if is_checkpoint(name) else load_model(name).model


def _measure(name: str, model: "PreTrainedModel", reader: Any, text: str, size: dict[str, Any]) -> "Measured":
    from gac.api import perplexity
    from gac.reporting.comparison import Measured

    found = perplexity(model, reader, text, **size)
    note(f"{name}: {found}")
    return Measured(name, found)


def _reader(model: str, against: str | None, tokenizer: str | None) -> Any:
    """The tokenizer of both models, which has to be the same."""
    from gac.models.loading import load_tokenizer

    reader = load_tokenizer(tokenizer or model)
    if tokenizer is None and against is not None and load_tokenizer(against).get_vocab() != reader.get_vocab():
        raise ModelError(
            f"{model} and {against} have different vocabularies",
            "two models of the same tokens: perplexities by the token compare nothing else",
            "Evaluate each on its own.",
        )
    return reader


def _prediction(plan: "Plan | None", name: str, against: "PreTrainedModel") -> float | None:
    """What the plan promised for ln(perplexity / dense), where ``against`` is the dense model it was made for."""
    from gac.models.loading import model_digest

    if plan is None:
        return None
    names = [weight.name for weight in plan.weights]
    parameters = {name for name, _ in against.named_parameters()}
    if parameters.issuperset(f"{name}.weight" for name in names) and (
        model_digest(against, names) == plan.model_digest
    ):
        return plan.prediction.loss
    note(f"{name} is not the model that the plan was made for ({plan.model}): its prediction is left out")
    return None


def _document(result: "Comparison", plan: "Plan | None") -> dict[str, Any]:
    document: dict[str, Any] = {"model": result.model.name, "perplexity": asdict(result.model.perplexity)}
    if result.against is not None:
        document["against"] = {"model": result.against.name, "perplexity": asdict(result.against.perplexity)}
        document |= {"ratio": result.ratio, "log_ratio": result.log_ratio}
    if result.predicted is not None:
        document |= {"predicted_log_ratio": result.predicted, "predicted_perplexity": result.predicted_perplexity}
    return document if plan is None else document | {"plan": plan_document(plan)}


def _tables(result: "Comparison", plan: "Plan | None") -> list[Any]:
    from gac.reporting.tables import perplexity_table, plan_line

    return [perplexity_table(result), *([plan_line(plan)] if plan else [])]


def _write(document: dict[str, Any], output: Path) -> None:
    with atomic_path(output) as temporary:
        temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    note(f"saved as {output}")
