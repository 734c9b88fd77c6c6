"""Plans as rich tables, at most 100 columns wide; nothing is printed here."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich.console import Group
from rich.text import Text

from gac.forms import form_named
from gac.models.sites import short_names
from gac.plan import Plan, SiteChoice, WeightChoice
from gac.reporting.layout import legend, new_table


def plan_summary(plan: Plan) -> Text:
    """``Plan.summary`` with its first line standing out."""
    text = Text(plan.summary())
    text.stylize("bold", 0, text.plain.index("\n"))
    return text


def plan_table(plan: Plan) -> Group:
    """One row a layer: the form and dim of every weight, the parameters kept and the loss in nats a token."""
    layers = weights_by_layer(plan)
    kinds = kinds_of(layers)
    columns = [("layer", ">"), *((kind.removesuffix("_proj"), ">") for kind in kinds), ("kept", ">"), ("loss", ">")]
    table = new_table(columns)
    for (layer, weights), (_, sites) in zip(layers, _by_layer(plan), strict=True):
        cells = (cell_of(weights[kind]) if kind in weights else "" for kind in kinds)
        table.add_row(str(layer), *cells, *_totals(sites))
    return Group(
        table,
        legend(legend_of(plan)),
    )


def _by_layer(plan: Plan) -> list[tuple[int, list[SiteChoice]]]:
    return [(layer, list(group)) for layer, group in groupby(plan.sites, key=lambda site: site.layer)]


def weights_by_layer(plan: Plan) -> list[tuple[int, dict[str, WeightChoice]]]:
    """Layer by layer, what every weight becomes, by its short name."""
    found = []
    for layer, sites in _by_layer(plan):
        weights = [weight for site in sites for weight in site.weights]
        called = short_names([weight.name for weight in weights])
        found.append((layer, {called[weight.name]: weight for weight in weights}))
    return found


def kinds_of(layers: Iterable[tuple[int, Mapping[str, WeightChoice]]]) -> list[str]:
    """The short names in any of the layers, in the order of the model."""
    return list(dict.fromkeys(kind for _, weights in layers for kind in weights))


def cell_of(weight: WeightChoice) -> str:
    """Form and dim in a few letters: ``r 192``; a dash for dense."""
    form = form_named(weight.form)
    return form.symbol if form.axis(weight.weight) is None else f"{form.symbol} {weight.dim}"


def legend_of(plan: Plan) -> str:
    """What the letters of the cells mean, of the forms in the plan and of dense."""
    forms = [form_named(name) for name in dict.fromkeys(weight.form for weight in plan.weights)]
    dense = form_named("dense")
    return "; ".join(f"{form.symbol}: {form.meaning}" for form in (*(one for one in forms if one is not dense), dense))


def _totals(sites: Sequence[SiteChoice]) -> tuple[str, str]:
    kept = sum(site.params for site in sites) / sum(site.dense_params for site in sites)
    return f"{kept:.3f}", f"{sum(site.loss for site in sites):.4f}"


def plan_line(plan: Plan) -> Text:
    """Budget and alignment of a plan, in two lines."""
    budget, chosen = plan.budget, sum(plan.alignment.values())
    return Text(
        f"budget     {budget.used:,} of {budget.total:,} targeted parameters; {budget.limit:,} allowed\n"
        f"alignment  {plan.aligned_fraction:.1%} of {chosen} chosen dims are multiples of 8"
    )
