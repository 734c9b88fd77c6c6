"""From chosen candidates to a plan: counts, predictions and what they rest on, all in one record."""

from collections.abc import Sequence

from gac.allocation.limits import floored
from gac.models.sites import Site
from gac.plan import (
    SCHEMA,
    Candidate,
    Certificate,
    Limit,
    Measured,
    Plan,
    Prediction,
    SiteChoice,
    WorkloadLatency,
    amounts,
)
from gac.recipe import Recipe
from gac.version import __version__


def assemble(
    sites: Sequence[Site],
    chosen: Sequence[Candidate],
    dense_ns: Sequence[int | None],
    recipe: Recipe,
    measured: Measured,
    certificate: Certificate,
    alternatives: Sequence[tuple[Candidate, ...]] | None = None,
) -> Plan:
    """Write down one chosen candidate a site.

    Args:
        dense_ns: latency of the dense sites, one a workload; None where unknown.
        alternatives: for each site what it could have had instead; None where that is not known.
    """
    others = alternatives or [()] * len(sites)
    choices = tuple(SiteChoice.of(*one) for one in zip(sites, chosen, others, strict=True))
    weights = [weight for choice in choices for weight in choice.weights]
    workloads = _workloads(recipe.deployment.workloads, chosen, dense_ns)
    limits = []
    for column, fraction in recipe.fractions.items():
        found = amounts(weights, workloads, column)
        assert found is not None, f"{column} of a chosen candidate is unknown"
        used, whole = found
        limit = floored(fraction, whole)
        limits.append(Limit(column, fraction, limit, used, whole, max(0, used - limit)))
    loss = float(sum(choice.loss for choice in choices))
    return Plan(
        schema_version=SCHEMA,
        gac_version=__version__,
        recipe=recipe,
        measured=measured,
        limits=tuple(limits),
        workloads=workloads,
        prediction=Prediction(loss, measured.perplexity(0.0), measured.perplexity(loss)),
        certificate=certificate,
        sites=choices,
    )


def _workloads(
    names: Sequence[str], chosen: Sequence[Candidate], dense_ns: Sequence[int | None]
) -> tuple[WorkloadLatency, ...]:
    found = []
    for at, (name, dense, ns) in enumerate(zip(names, dense_ns, summed_latency(chosen), strict=True)):
        weights = sum(len(one.dims) for one in chosen)
        unknown = sum(len(one.dims) for one in chosen if one.latency_ns[at] is None)
        interpolated = sum(one.interpolated[at] for one in chosen)
        found.append(WorkloadLatency(name, dense, ns, weights - interpolated - unknown, interpolated, unknown))
    return tuple(found)


def summed_latency(candidates: Sequence[Candidate]) -> tuple[int | None, ...]:
    """Summed ns for each workload; None where one is unknown."""
    columns = zip(*(one.latency_ns for one in candidates), strict=True)
    return tuple(None if None in column else sum(ns for ns in column if ns is not None) for column in columns)
