"""From chosen candidates to a plan: counts, predictions and provenance, all in one record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

from gac.allocation.candidates import CandidateSet
from gac.allocation.costs import KV_NUMBERS
from gac.allocation.latencies import UNKNOWN, recorded
from gac.allocation.limits import cache_limit
from gac.forms import form_named
from gac.forms.planned_sites import Fusing
from gac.models.sites import Site
from gac.plan import (
    SCHEMA,
    Alternative,
    Budget,
    Calibration,
    Certificate,
    KvCache,
    Plan,
    Prediction,
    ProfileUsed,
    Refit,
    Shots,
    SiteChoice,
    WeightChoice,
    WorkloadLatency,
)
from gac.version import __version__
from gac.workloads import Workload

_LARGEST = 709.0  # e to this power is about 8e307, near the largest float64


@dataclass(frozen=True)
class Provenance:
    """What a plan was made from, apart from the choice itself."""

    model: str
    model_digest: str
    model_params: int
    family: str
    method: str
    forms: tuple[str, ...]
    align: bool | int
    seed: int
    calibration: Calibration
    profile: ProfileUsed
    factor: float
    fused: Fusing = False
    refit: Refit = "none"
    shots: Shots = 1
    one_row: bool = False


def assemble(
    sites: Sequence[Site],
    chosen: Sequence[CandidateSet],
    dense: Sequence[CandidateSet],
    budget: float,
    limit: int,
    workloads: Sequence[Workload],
    latency: Mapping[str, float],
    certificate: Certificate,
    made_from: Provenance,
    kv_cache: float | None = None,
    alternatives: Sequence[tuple[Alternative, ...]] | None = None,
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
    used = sum(choice.params for choice in choices)
    return Plan(
        schema_version=SCHEMA,
        gac_version=__version__,
        model=made_from.model,
        model_digest=made_from.model_digest,
        family=made_from.family,
        method=made_from.method,
        forms=made_from.forms,
        align=made_from.align,
        fused=made_from.fused,
        refit=made_from.refit,
        shots=made_from.shots,
        one_row=made_from.one_row,
        seed=made_from.seed,
        calibration=made_from.calibration,
        profile=made_from.profile,
        budget=Budget(
            asked=budget,
            limit=limit,
            used=used,
            total=sum(site.params for site in sites),
            model=made_from.model_params,
            over=max(0, used - limit),
        ),
        latency=dict(latency),
        kv_cache=_kv_cache(chosen, dense, kv_cache),
        workloads=tuple(_workload(i, workload, chosen, dense) for i, workload in enumerate(workloads)),
        prediction=Prediction(
            loss, made_from.factor, predicted_perplexity(made_from, 0.0), predicted_perplexity(made_from, loss)
        ),
        certificate=certificate,
        sites=choices,
    )


def _kv_cache(chosen: Sequence[CandidateSet], dense: Sequence[CandidateSet], asked: float | None) -> KvCache:
    used, total = (sum(int(rows.cost(KV_NUMBERS)[0]) for rows in sets) for sets in (chosen, dense))
    if asked is None:
        return KvCache(used, total)
    limit = cache_limit(asked, total)
    return KvCache(used, total, asked, limit, max(0, used - limit))


def predicted_perplexity(made_from: Provenance, loss: float) -> float:
    """On the calibration text, for a predicted loss; the smallest budgets of large models lose hundreds of nats."""
    return exp(min(made_from.calibration.loss + loss, _LARGEST))


def _site_choice(site: Site, row: CandidateSet, others: tuple[Alternative, ...]) -> SiteChoice:
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
    """Form and dim of each weight of a site in its one candidate."""
    return tuple(
        WeightChoice.of(weight, str(form), int(dim))
        for weight, form, dim in zip(site.weights, row.forms[0], row.dims[0], strict=True)
    )


def _workload(
    index: int, workload: Workload, chosen: Sequence[CandidateSet], dense: Sequence[CandidateSet]
) -> WorkloadLatency:
    plan_ns, unknown = total_ns(index, chosen)
    dense_ns, _ = total_ns(index, dense)
    weights = sum(row.dims.shape[1] for row in chosen)
    interpolated = int(sum(row.interpolated[0, index] for row in chosen))
    return WorkloadLatency(str(workload), dense_ns, plan_ns, weights - interpolated - unknown, interpolated, unknown)


def total_ns(index: int, rows: Sequence[CandidateSet]) -> tuple[int | None, int]:
    """Summed ns, or None with the number of weights in the sites whose latency is unknown."""
    unknown = sum(row.dims.shape[1] for row in rows if row.latency[0, index] == UNKNOWN)
    return (None, unknown) if unknown else (sum(int(row.latency[0, index]) for row in rows), 0)
