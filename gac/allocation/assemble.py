"""From chosen candidates to a plan: counts, predictions and what they rest on, all in one record."""

from collections.abc import Sequence
from math import exp

from gac.allocation.candidates import CandidateSet
from gac.allocation.latencies import UNKNOWN, recorded
from gac.allocation.limits import dense_total, floored, total
from gac.costs import ns_of
from gac.forms import form_named
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
    WeightChoice,
    WorkloadLatency,
)
from gac.recipe import Recipe
from gac.version import __version__
from gac.workloads import Workload

_LARGEST = 709.0  # e to this power is about 8e307, near the largest float64


def assemble(
    sites: Sequence[Site],
    chosen: Sequence[CandidateSet],
    dense: Sequence[CandidateSet],
    recipe: Recipe,
    measured: Measured,
    certificate: Certificate,
    alternatives: Sequence[tuple[Candidate, ...]] | None = None,
) -> Plan:
    """Write down one chosen candidate a site.

    Args:
        chosen: for each site its candidate set, cut to the one row that was chosen.
        dense: for each site the dense candidate, for comparison.
        alternatives: for each site what it could have had instead; None where that is not known.
    """
    others = alternatives or [()] * len(sites)
    choices = tuple(_site_choice(*one) for one in zip(sites, chosen, others, strict=True))
    loss = float(sum(choice.loss for choice in choices))
    workloads = recipe.deployment.parsed
    return Plan(
        schema_version=SCHEMA,
        gac_version=__version__,
        recipe=recipe,
        measured=measured,
        limits=_limits(recipe, chosen, dense),
        workloads=tuple(_workload(workload, chosen, dense, workloads) for workload in workloads),
        prediction=Prediction(loss, predicted_perplexity(measured, 0.0), predicted_perplexity(measured, loss)),
        certificate=certificate,
        sites=choices,
    )


def _limits(recipe: Recipe, chosen: Sequence[CandidateSet], dense: Sequence[CandidateSet]) -> tuple[Limit, ...]:
    found = []
    for column, fraction in recipe.fractions.items():
        whole, used = dense_total(dense, column), total(chosen, column)
        assert used is not None, f"{column} of a chosen candidate is unknown"
        limit = floored(fraction, whole)
        found.append(Limit(column, fraction, limit, used, whole, max(0, used - limit)))
    return tuple(found)


def predicted_perplexity(measured: Measured, loss: float) -> float:
    """On the calibration text, for a predicted loss; the smallest budgets of large models lose hundreds of nats."""
    return exp(min(measured.calibration.loss + loss, _LARGEST))


def _site_choice(site: Site, row: CandidateSet, others: tuple[Candidate, ...]) -> SiteChoice:
    assert len(row) == 1
    weights = weight_choices(site, row)
    params = sum(form_named(weight.form).params(weight.weight, weight.dim) for weight in weights)
    assert params == int(row.params[0])
    return SiteChoice(
        site.name,
        site.layer,
        site.kind,
        weights,
        params,
        site.params,
        float(row.loss[0]),
        recorded(row.latency[0]),
        shared=bool(row.shared[0]),
        alternatives=others,
    )


def weight_choices(site: Site, row: CandidateSet) -> tuple[WeightChoice, ...]:
    """Form, dim and scheme of each weight of a site in its one candidate."""
    return tuple(
        WeightChoice(weight, str(form), int(dim), str(scheme))
        for weight, form, dim, scheme in zip(site.weights, row.forms[0], row.dims[0], row.schemes[0], strict=True)
    )


def _workload(
    workload: Workload, chosen: Sequence[CandidateSet], dense: Sequence[CandidateSet], workloads: Sequence[Workload]
) -> WorkloadLatency:
    at = list(workloads).index(workload)
    dense_ns, plan_ns = (total(rows, ns_of(workload)) for rows in (dense, chosen))
    weights = sum(row.dims.shape[1] for row in chosen)
    unknown = sum(row.dims.shape[1] for row in chosen if row.latency[0, at] == UNKNOWN)
    interpolated = int(sum(row.interpolated[0, at] for row in chosen))
    return WorkloadLatency(str(workload), dense_ns, plan_ns, weights - interpolated - unknown, interpolated, unknown)
