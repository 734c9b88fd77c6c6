"""The plan of a padded GAC checkpoint: its new dims and parameters."""

from dataclasses import replace

from gac.forms import form_named
from gac.plan import KvCache, Plan, SiteChoice, WeightChoice
from gac.repairs.shared_dims import Dims


def padded_plan(plan: Plan, dims: Dims) -> Plan:
    """The plan with new dims, counted again in exact integers.

    What it loses is as before, for zeros change no output. That no choice within the budget loses less is no longer
    proved of it; its latencies and what its sites could have had instead, which are of other dims, are left out.

    Args:
        dims: by the name of the weight, or of the site that is shorter as a whole.
    """
    sites = tuple(_padded_site(site, dims) for site in plan.sites)
    used = sum(site.params for site in sites)
    proof = replace(plan.certificate, status="feasible", method=f"{plan.certificate.method}; zero-padded by gac repair")
    return replace(
        plan,
        sites=sites,
        budget=replace(plan.budget, used=used, over=max(0, used - plan.budget.limit)),
        kv_cache=None if plan.kv_cache is None else _cache(plan.kv_cache, sites),
        certificate=proof,
        latency={},
        workloads=(),
    )


def _padded_site(site: SiteChoice, dims: Dims) -> SiteChoice:
    weights = tuple(replace(one, dim=_dim(site, one, dims)) for one in site.weights)
    params = sum(one.params for one in weights)
    return replace(site, weights=weights, params=params, latency_ns=(), alternatives=())


def _dim(site: SiteChoice, choice: WeightChoice, dims: Dims) -> int:
    name = site.site if form_named(choice.form).shortens(choice.weight) else choice.name
    return dims.get(name, choice.dim)


def _cache(cache: KvCache, sites: tuple[SiteChoice, ...]) -> KvCache:
    used = sum(form_named(one.form).cached(one.weight, one.dim) for site in sites for one in site.weights)
    return replace(cache, used=used, over=0 if cache.limit is None else max(0, used - cache.limit))
