"""The command that goes through the whole range of budgets: a record, a table, a figure."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.files import FILE, Figure, NewFile
from gac.cli.measuring import STATISTICS_KEPT, recipe_options
from gac.cli.options import output_option, refuse_given
from gac.cli.verb import Answer, Verb, note
from gac.errors import PlanError

if TYPE_CHECKING:
    from gac.allocation.frontier import Frontier


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
@output_option(FILE, "The frontier to write; an existing file is replaced.", default="frontier.json")
@click.option(
    "--plot",
    type=Figure(),
    metavar="FILE",
    help="Draw perplexity against parameters and latency (.png, .pdf or .svg).",
)
def frontier(
    source: str, plot: Path | None, output: Path, asked: Callable[[str], dict[str, Any]], **steps: Any
) -> Answer:
    """Choose for the whole range of budgets at once.

    MODEL is a directory, a hub id, or smollm2 (packaged). Measures what each choice loses on calibration text, once,
    then finds the least loss for each of many budgets, each with a proof. A FILE that this command wrote is shown
    again, without a model.
    """
    from gac.reporting.frontier import figure_of_frontier, frontier_table
    from gac.reporting.page import save

    if source.endswith(".json") or Path(source).is_file():  # models are directories or names
        measuring = {parameter.name for parameter in click.get_current_context().command.params}
        refuse_given(measuring - {"source", "plot", "as_json"}, f"with a model; {source} is a saved frontier.")
        path, found = source, gac.Frontier.load(source)
    else:
        NewFile(PlanError).check(output)
        path, found = str(output), gac.frontier(source, **asked(source), **steps)
        found.save(output)
        note(f"saved as {output}")
    if plot is not None:
        save(figure_of_frontier(found), plot)
        note(f"drawn in {plot}")
    return Answer({"path": path} | _document(found), lambda: [frontier_table(found)])


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
