"""The command that goes through the whole range of budgets: a record, a table, a figure."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gac.cli.checks import check_file
from gac.cli.measuring import STATISTICS_KEPT, recipe_options, say_cost
from gac.cli.verb import Answer, Verb, note
from gac.errors import GacError, PlanError
from gac.recipe import Recipe

if TYPE_CHECKING:
    from gac.allocation.frontier import Frontier

_OF_FILES = ("source", "plot", "as_json")


@click.command(cls=Verb, resume=STATISTICS_KEPT)
@click.argument("source", metavar="MODEL|FILE")
@click.option("--points", type=int, default=100, show_default=True, help="How many budgets, from the smallest up.")
@click.option(
    "--limit",
    default="params",
    show_default=True,
    metavar="params|WORKLOAD",
    help="What is limited: parameters, or the latency of one of the workloads.",
)
@recipe_options(limits=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("frontier.json"),
    show_default=True,
    help="The frontier to write; an existing file is replaced.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw perplexity against parameters and latency (.png, .pdf or .svg).",
)
def frontier(
    source: str, plot: Path | None, output: Path, recipe: Callable[[], Recipe], tokenizer: str | None, **steps: Any
) -> Answer:
    """Choose for the whole range of budgets at once.

    MODEL is a directory, a hub id, or smollm2 (packaged). Measures what each choice loses on calibration text, once,
    then finds the least loss for each of many budgets, each with a proof. A FILE that this command wrote is shown
    again, without a model.
    """
    if plot is not None:
        from gac.reporting.page import check_figure

        check_figure(plot)
        check_file(plot, GacError)
    found = _saved(source) if _is_file(source) else _made(source, output, recipe(), tokenizer, **steps)
    if plot is not None:
        from gac.reporting.frontier import figure_of_frontier
        from gac.reporting.page import save_figure

        save_figure(figure_of_frontier(found), plot)
        note(f"drawn in {plot}")
    path = source if _is_file(source) else str(output)
    return Answer({"path": path} | _document(found), lambda: _tables(found))


def _is_file(source: str) -> bool:
    """Models are directories or names."""
    return source.endswith(".json") or Path(source).is_file()


def _saved(source: str) -> "Frontier":
    """A frontier read back; options that a model is measured with are refused, for they would do nothing."""
    from gac.allocation.frontier import Frontier

    ctx = click.get_current_context()
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name not in _OF_FILES and ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[-1]} goes with a model; {source} is a saved frontier.", ctx)
    return Frontier.load(source)


def _made(model: str, output: Path, recipe: Recipe, tokenizer: str | None, **steps: Any) -> "Frontier":
    check_file(output, PlanError)
    say_cost(model, recipe)
    from gac.api import frontier as make_frontier
    from gac.models.loading import load_tokenizer

    reader = load_tokenizer(tokenizer) if tokenizer else None
    found = make_frontier(model, recipe=recipe, tokenizer=reader, **steps)
    found.save(output)
    note(f"saved as {output}")
    return found


def _tables(found: "Frontier") -> list[Any]:
    from gac.reporting.frontier import frontier_table

    return [frontier_table(found)]


def _document(found: "Frontier") -> dict[str, Any]:
    """The frontier without its sites and choices, and with the fractions that follow from them."""
    from gac.io import to_json

    document: dict[str, Any] = json.loads(to_json(found))
    del document["sites"]
    for point in document["points"]:
        del point["choice"]
        point["kept"] = point["params"] / found.dense_params
    dense = {"params": found.dense_params, "perplexity": found.dense_perplexity, "latency_ns": found.dense_ns}
    return document | {"dense": dense}
