"""A plan layer by layer: the table of its choices, and short names for weights and choices."""

from collections.abc import Iterable, Mapping, Sequence

from gac.core.display import Table
from gac.forms import form_named
from gac.models.sites import Site, short_names
from gac.plan.choices import SiteChoice, WeightChoice
from gac.plan.record import PlanRecord
from gac.schemes import DEFAULT_SCHEME


def plan_table(plan: PlanRecord) -> Table:
    """One row a layer: the form and dim of every weight, the parameters kept and the loss in nats a token."""
    layers = weights_by_layer(plan)
    kinds = kinds_of(layers)
    columns = [("layer", ">"), *((kind.removesuffix("_proj"), ">") for kind in kinds), ("kept", ">"), ("loss", ">")]
    rows = []
    for layer, weights in layers.items():
        sites = [site for site in plan.sites if site.layer == layer]
        kept = sum(site.params for site in sites) / sum(site.dense_params for site in sites)
        cells = [cell_of(weights[kind]) if kind in weights else "" for kind in kinds]
        rows.append([str(layer), *cells, f"{kept:.3f}", f"{sum(site.loss for site in sites):.4f}"])
    return Table(columns, rows, notes=legend_of(plan))


def short_names_of(sites: Iterable[Site | SiteChoice]) -> dict[str, str]:
    layers: dict[int, list[str]] = {}
    for site in sites:
        layers.setdefault(site.layer, []).extend(weight.name for weight in site.weights)
    return {name: short for names in layers.values() for name, short in short_names(names).items()}


def weights_by_layer(plan: PlanRecord) -> dict[int, dict[str, WeightChoice]]:
    short = short_names_of(plan.sites)
    layers: dict[int, dict[str, WeightChoice]] = {}
    for site in plan.sites:
        layers.setdefault(site.layer, {}).update({short[weight.name]: weight for weight in site.weights})
    return layers


def kinds_of(layers: Mapping[int, Mapping[str, WeightChoice]]) -> list[str]:
    return list(dict.fromkeys(kind for weights in layers.values() for kind in weights))


def cell_of(weight: WeightChoice) -> str:
    """Form, dim and a lossy scheme in a few letters: ``r 192 w4a16``; a dash for dense."""
    form = form_named(weight.form)
    label = form.symbol if form.latency.axis(weight.weight) is None else form.label(weight.dim)
    return label if weight.scheme == DEFAULT_SCHEME else f"{label} {weight.scheme}"


def legend_of(plan: PlanRecord) -> str:
    """The letters of the cells explained, for the forms of the plan and dense, and its lossy schemes."""
    names = dict.fromkeys(weight.form for weight in plan.weights if weight.form != "dense")
    letters = dict.fromkeys(f"{form.symbol}: {form.meaning}" for form in map(form_named, (*names, "dense")))
    schemes = lossy_schemes(plan)
    return "; ".join([*letters, *([f"{', '.join(schemes)}: rounded"] if schemes else [])])


def lossy_schemes(plan: PlanRecord) -> list[str]:
    return sorted({weight.scheme for weight in plan.weights} - {DEFAULT_SCHEME})


def choice(weight: WeightChoice) -> str:
    """A weight's choice in words: ``dense``, ``low_rank 128 w4a16``, with spaces that do not break."""
    dim = [] if weight.form == "dense" else [f"{weight.dim:,}"]
    scheme = [] if weight.scheme == DEFAULT_SCHEME else [weight.scheme]
    return "\N{NO-BREAK SPACE}".join([weight.form, *dim, *scheme])


def choices(weights: Sequence[WeightChoice]) -> str:
    """The choices of a site in words, once where all are the same."""
    words = list(map(choice, weights))
    if len(set(words)) == 1:
        return words[0]
    short = short_names([weight.name for weight in weights])
    return ", ".join(f"{short[weight.name]} {word}" for weight, word in zip(weights, words, strict=True))
