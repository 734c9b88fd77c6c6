"""Whether a budget can be met at all, known before anything is measured."""

from collections.abc import Sequence

import numpy as np

from gac.allocation.candidates import Limited, candidates
from gac.errors import BudgetError
from gac.forms import form_named
from gac.profiling.table import Profile
from gac.sites import LossCurve, Site, SiteCurves, Workload


def check_reachable(
    sites: Sequence[Site],
    limit: int,
    *,
    forms: Sequence[str],
    profile: Profile,
    workloads: Sequence[Workload],
    align: bool,
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
                _flat(site),
                forms=forms,
                profile=profile,
                workloads=workloads,
                align=align,
                limited=Limited(params=True),
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


def _flat(site: Site) -> SiteCurves:
    """Curves that lose nothing anywhere, so that the smallest candidate is among those that stay."""
    low_rank = {weight.name: _zeros(form_named("low_rank").full(weight)) for weight in site.weights}
    return SiteCurves(site.name, low_rank, None if site.neurons is None else _zeros(site.neurons))


def _zeros(full: int) -> LossCurve:
    return LossCurve(np.zeros(full + 1))
