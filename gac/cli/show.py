"""Commands that show: what there is to choose for a model, plans beside each other, and the page of a plan."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.cli.options import (
    FILE,
    Target,
    forms_option,
    named,
    named_plans,
    output_option,
    plan_document,
    profile_option,
    tokens_document,
)
from gac.cli.verb import Answer, Verb, note
from gac.core.errors import ModelError
from gac.forms import FORMS
from gac.plan.token_plan import TokenPlan, check_one_kind, either

if TYPE_CHECKING:
    from gac.plan.plan import Plan
    from gac.profiling.table import Profile


@click.command(cls=Verb)
@click.argument("model")
@forms_option("A form to show, or tokens (kept in the cache). Repeatable. Default: all.", default=())
def graph(model: str, forms: Sequence[str]) -> Answer:
    """Show which dims of which operators each choice for MODEL changes.

    MODEL is a known name (llama-3-8b), a directory or a hub id; only its config is read. A low-rank pair's rank is N of
    one GEMM and K of the next, a width N of the MLP's first ones and K of its last, and so on. The tokens that a layer
    keeps in its cache are N of attention's scores and K of its mixed values.
    """
    from gac.forms.planned_sites import check_forms_fit
    from gac.models.families import family_of
    from gac.models.loading import load_config
    from gac.reporting.dims_moved import TOKENS, choices, choices_table, tokens_kept
    from gac.tokens.defaults import STEP

    config = load_config(model)
    family, named = family_of(config), [form for form in forms if form != TOKENS]
    for form in named:
        FORMS.get(form, also=(TOKENS,))
    sites = family.sites(config)
    check_forms_fit(sites, named, config.model_type)
    found = choices(sites, named if forms else FORMS.names)
    with nullcontext() if forms else suppress(ModelError):
        found += (tokens_kept(family, config, STEP),) if TOKENS in forms or not forms else ()
    return Answer({"model": model, "choices": [asdict(one) for one in found]}, lambda: [choices_table(found)])


@click.command(cls=Verb)
@click.argument("files", metavar="A.json B.json [C.json ...]", nargs=-1, type=FILE)
def compare(files: tuple[Path, ...]) -> Answer:
    """Compare plans for one model.

    One row a plan: the parameters kept and how many are over the limit, the perplexity predicted on calibration text,
    the latency predicted for each workload, and the share of chosen dims that are multiples of 8. For two plans, the
    weights that differ most as well. Plans of gac tokens are compared with each other: tokens, loss, memory, latency.
    """
    if len(files) < 2:
        raise click.UsageError("Name two plans or more.")
    called = named(files)
    check_one_kind(files)
    if isinstance(either(files[0]), TokenPlan):
        return _tokens_compared(called)
    from gac.reporting.tables import comparison_table, differences_table

    plans = named_plans(files)
    comparisons = [plans[0][1].compare(plan) for _, plan in plans[1:]]
    entries = [{"path": str(file)} | plan_document(plan) for file, (_, plan) in zip(files, plans, strict=True)]
    document: dict[str, Any] = {"plans": entries}
    tables: list[Any] = [comparison_table(plans)]
    if len(comparisons) == 1:
        document["differences"] = [asdict(difference) for difference in comparisons[0].differences]
        tables.append(differences_table(comparisons[0]))
    return Answer(document, lambda: tables)


def _tokens_compared(files: dict[str, Path]) -> Answer:
    from gac.reporting.figures.tokens import check_alike
    from gac.reporting.tokens import layers_apart, tokens_comparison

    plans = TokenPlan.opened_each(files)
    check_alike(plans)
    document = {"plans": [{"path": str(files[name])} | tokens_document(plan) for name, plan in plans.items()]}
    both = [layers_apart(plans)] if len(plans) == 2 else []
    return Answer(document, lambda: [tokens_comparison(plans), *both])


@click.command(cls=Verb)
@click.argument("plan_file", metavar="PLAN", type=FILE)
@click.option(
    "--against",
    multiple=True,
    type=FILE,
    metavar="PLAN",
    help="Another plan for the same model, to compare with. Repeatable.",
)
@click.option(
    "--frontier",
    "frontier_file",
    type=FILE,
    metavar="FILE",
    help="Draw the best choices for other budgets; made by gac frontier.",
)
@click.option(
    "--tokens",
    type=FILE,
    metavar="TOKENS",
    help="How many tokens each layer keeps beside it, for the same model; made by gac tokens.",
)
@profile_option("The latency table that the plan names. Default: look it up among those that gac profiles lists.")
@output_option(Target(), "The page to write; an existing file is replaced.", default="report.html")
def report(
    plan_file: Path,
    against: tuple[Path, ...],
    frontier_file: Path | None,
    tokens: Path | None,
    profile: str | None,
    output: Path,
) -> Answer:
    """Write one page about PLAN: what every weight becomes and why, the proof, how to make it again.

    Of a plan of gac tokens it says what every layer keeps, and what each budget loses. The page is a single HTML file
    that needs no network.
    """
    called = named((plan_file, *against))
    check_one_kind(called.values())
    if isinstance(either(plan_file), TokenPlan):
        (name, own), *rest = called.items()
        gac.report(own, output, against=dict(rest), frontier=frontier_file, profile=profile, tokens=tokens, name=name)
        return _written(output, {"layers": len(TokenPlan.load(own).layers)})
    (name, plan), *others = named_plans((plan_file, *against))
    frontier = None if frontier_file is None else gac.Frontier.load(frontier_file)
    found = _profile(plan, profile)
    gac.report(plan, output, against=dict(others), frontier=frontier, profile=found, tokens=tokens, name=name)
    return _written(output, {"sites": len(plan.sites)})


def _written(output: Path, counts: dict[str, int]) -> Answer:
    size = output.stat().st_size
    return Answer({"path": str(output), "bytes": size} | counts, lambda: [f"saved as {output}, {size / 1e3:,.0f} kB"])


def _profile(plan: "Plan", name: str | None) -> "Profile | None":
    from gac.reporting.report.sources import profile_of

    if name is not None:
        return gac.Profile.load(name)
    found = profile_of(plan)
    if found is None:
        digest = plan.measured.profile.digest[:12]
        note(f"the latency table {digest} is not at hand: the page will not say what the next dims would take")
    return found
