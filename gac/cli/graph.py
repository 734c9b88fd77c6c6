"""The command that shows which dims of which operators a model's choices move."""

from collections.abc import Sequence
from dataclasses import asdict

import click

from gac.cli.options import known_or_config
from gac.cli.verb import Answer, Verb
from gac.forms import FORMS


@click.command(cls=Verb, resume="Nothing was written; run it again.")
@click.argument("model")
@click.option(
    "--form",
    "forms",
    multiple=True,
    help="A form to show. Repeatable. Default: every form.",
)
def graph(model: str, forms: Sequence[str]) -> Answer:
    """Show which dims of which operators each choice for MODEL changes.

    MODEL is a known name (llama-3-8b), a directory or a hub id; only its config is read. A low-rank pair's rank is N of
    one GEMM and K of the next, a width N of the MLP's first ones and K of its last, and so on.
    """
    from gac.forms.planned_sites import check_forms_fit
    from gac.models.families import family_of, text_config
    from gac.models.shapes import shapes_of
    from gac.reporting.dims_moved import choices
    from gac.reporting.graph import graph_table

    config = text_config(shapes_of(known_or_config(model)))
    sites = family_of(config).sites(config)
    check_forms_fit(sites, forms, config.model_type)
    found = choices(sites, forms or FORMS.names)
    return Answer({"model": model, "choices": [asdict(one) for one in found]}, lambda: [graph_table(found)])
