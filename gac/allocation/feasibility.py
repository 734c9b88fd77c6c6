"""Whether a budget can be met at all, known before anything is measured."""

from collections.abc import Sequence

import numpy as np

from gac.allocation.candidates import candidates, dense_candidate, step_of
from gac.allocation.costs import PARAMS
from gac.allocation.latencies import UNKNOWN
from gac.allocation.limits import cache_limit
from gac.curves import LossCurve, LossCurves
from gac.errors import BudgetError, ProfileError
from gac.forms import FORMS, form_named
from gac.models.sites import Site
from gac.profiling.table import Profile
from gac.schemes import DEFAULT_SCHEME
from gac.workloads import Workload


def check_reachable(
    sites: Sequence[Site],
    limit: int,
    *,
    forms: Sequence[str],
    profile: Profile,
    workloads: Sequence[Workload],
    align: bool | int,
    one_row: bool = False,
) -> None:
    """Refuse a limit below the smallest candidates of all sites together.

    Raises:
        BudgetError: with the smallest budget that can be reached.
    """
    of_kind: dict[str, int] = {}
    for site in sites:
        if site.kind not in of_kind:
            found = candidates(
                site,
                _flat(site, forms),
                forms=forms,
                profile=profile,
                workloads=workloads,
                align=align,
                limited=(PARAMS,),
                one_row=one_row,
            )
            of_kind[site.kind] = int(found.params.min())
    smallest = sum(of_kind[site.kind] for site in sites)
    total = sum(site.params for site in sites)
    if smallest > limit:
        least = -(-smallest * 10**6 // total) / 10**6
        raise BudgetError(
            f"a limit of {limit:,} of {total:,} parameters ({limit / total:.6g})",
            f"at least {smallest:,}, the smallest that forms {', '.join(forms) or 'dense'} can reach",
            f"Ask for a budget of {least:g} or more, or allow more forms.",
        )


def check_one_row(sites: Sequence[Site], profile: Profile, workloads: Sequence[Workload]) -> None:
    """Refuse to plan for one row in Triton with a profile that does not know what the dense weights take so.

    Raises:
        ProfileError: names the first site and workload.
    """
    single = [workload for workload in workloads if workload.rows == 1]
    for site in sites:
        rows = dense_candidate(site, profile=profile, workloads=single, one_row=True)
        for workload, ns in zip(single, rows.latency[0].tolist(), strict=True):
            if ns == UNKNOWN:
                raise ProfileError(
                    f"the profile lacks the latency of {site.name} for {workload} in Triton",
                    "a profile of this model's shapes at one row",
                    "Measure it with gac profile --model NAME --one-row (and --fuse), or plan without one_row.",
                )


def check_cache_reachable(sites: Sequence[Site], fraction: float, forms: Sequence[str], align: bool | int) -> None:
    """Refuse a KV-cache limit below what the forms can reach, whatever the profile says of their dims.

    Raises:
        BudgetError: with the smallest limit that can be reached; or the fraction is not in (0, 1].
    """
    dense = form_named("dense")
    smallest = total = 0
    for weight in (weight for site in sites for weight in site.weights):
        whole = dense.cached(weight, dense.full(weight))
        taken = [form_named(name) for name in forms if form_named(name).takes(weight)]
        smallest += min([whole, *(form.cached(weight, step_of(form, align)) for form in taken)])
        total += whole
    if smallest > cache_limit(fraction, total):
        raise BudgetError(
            f"a KV-cache limit of {fraction:g}",
            f"at least {smallest / total:.4f}, the smallest that forms {', '.join(forms) or 'dense'} can reach",
            _smaller_cache(sites, forms),
        )


def _smaller_cache(sites: Sequence[Site], forms: Sequence[str]) -> str:
    """What to do where the forms make the cache no smaller: name those that would."""
    weights = [weight for site in sites for weight in site.weights if weight.cached]
    others = [
        form.name for form in FORMS if form.name not in forms and any(form.shortens(weight) for weight in weights)
    ]
    return f"Allow more, or add the form {others[0]}, which shortens the cached values." if others else "Allow more."


def _flat(site: Site, forms: Sequence[str]) -> LossCurves:
    """Curves that lose nothing anywhere, so that the smallest candidate is among those that stay."""
    return LossCurves(
        {
            (form.name, DEFAULT_SCHEME, weight.name): LossCurve(np.zeros(form.full(weight) + 1))
            for form in map(form_named, forms)
            for weight in site.weights
            if form.takes(weight)
        }
    )
