"""The plan of a padded GAC checkpoint: its new dims and parameters."""

from collections.abc import Sequence
from dataclasses import replace

from gac.costs import COSTS
from gac.forms import form_named
from gac.plan import Limit, Plan, SiteChoice, WeightChoice, counted
from gac.repairs.shared_dims import Dims


def padded_plan(plan: Plan, dims: Dims) -> Plan:
    """The plan with new dims, counted again in exact integers.

    What it loses is as before, for zeros change no output. That no choice within the budget loses less is no longer
    proved of it; its latencies and what its sites could have had instead, which are of other dims, are left out.

    Args:
        dims: by the name of the weight, or of the site that is shorter as a whole.
    """
    sites = tuple(_padded_site(site, dims) for site in plan.sites)
    weights = [weight for site in sites for weight in site.weights]
    recipe, proof = plan.recipe, plan.certificate
    pairs = [(one, price) for one, price in zip(plan.limits, proof.multipliers, strict=True) if one.column in COSTS]
    return replace(
        plan,
        recipe=replace(
            recipe,
            deployment=replace(recipe.deployment, workloads=()),
            limits=replace(recipe.limits, latency={}),
        ),
        sites=sites,
        limits=tuple(_counted(one, weights) for one, _ in pairs),
        certificate=replace(
            proof,
            status="feasible",
            method=f"{proof.method}; zero-padded by gac repair",
            multipliers=tuple(price for _, price in pairs),
        ),
        workloads=(),
    )


def _counted(limit: Limit, weights: Sequence[WeightChoice]) -> Limit:
    used, _ = counted(weights, limit.column)
    return replace(limit, used=used, over=max(0, used - limit.limit))


def _padded_site(site: SiteChoice, dims: Dims) -> SiteChoice:
    weights = tuple(replace(one, dim=_dim(site, one, dims)) for one in site.weights)
    params = sum(one.params for one in weights)
    return replace(site, weights=weights, params=params, latency_ns=(), alternatives=())


def _dim(site: SiteChoice, choice: WeightChoice, dims: Dims) -> int:
    name = site.site if form_named(choice.form).shortens(choice.weight) else choice.name
    return dims.get(name, choice.dim)
