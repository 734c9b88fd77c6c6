"""The record of a frontier: its points, and the candidates that they choose among; counted again when read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum, isclose

from gac.allocation.assemble import assemble, summed_latency
from gac.allocation.limits import floored
from gac.costs import PARAMS
from gac.display import Shown
from gac.errors import PlanError
from gac.io import Record
from gac.models.sites import Site
from gac.plan import Candidate, Certificate, Measured, Plan, check_candidate
from gac.recipe import Limits, Recipe, check_fraction

SCHEMA = 2
_STRICT = {"extra": "forbid", "allow_inf_nan": False}
_EDITED = "Make the frontier again; this one was edited."


@dataclass(frozen=True)
class SiteOptions:
    """A site as it is, and those of its candidates that some point chooses."""

    site: Site
    dense: Candidate
    options: tuple[Candidate, ...]
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class FrontierPoint:
    """The choice that loses least within one limit.

    Attributes:
        asked: the limit as a fraction of the dense amount; ``gac.allocate`` takes it as it is.
        limit: ``floor(asked * dense amount)``, parameters or ns.
        params: parameters of the targeted weights.
        loss: predicted nats a token more than dense.
        perplexity: predicted, on the calibration text; e**709 stands for anything larger.
        latency_ns: of the targeted weights, one a workload; None where the profile lacks a shape.
        choice: for each site the index of its option.
        certificate: the proof for this limit.
    """

    asked: float
    limit: int
    params: int
    loss: float
    perplexity: float
    latency_ns: tuple[int | None, ...]
    choice: tuple[int, ...]
    certificate: Certificate
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, repr=False)
class Frontier(Shown, Record):
    """The least loss for every budget from the smallest one that can be met.

    Attributes:
        recipe: what was asked for, as for a plan; its limits are those of no point.
        measured: as for a plan.
        limit: what is limited: ``params``, or the one of the recipe's workloads whose latency is.
        sites: in model order.
        points: limits rise and losses fall strictly. A limit that a smaller one's choice serves as well has no point.
    """

    schema_version: int
    gac_version: str
    recipe: Recipe
    measured: Measured
    limit: str
    sites: tuple[SiteOptions, ...]
    points: tuple[FrontierPoint, ...]
    __pydantic_config__ = _STRICT
    _error, _indent = PlanError, None

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA:
            raise PlanError(
                f"frontier has schema version {self.schema_version}",
                f"version {SCHEMA}",
                "Make the frontier again with this version of GAC.",
            )
        _check(self)

    @property
    def workloads(self) -> tuple[str, ...]:
        """The columns of every ``latency_ns``."""
        return self.recipe.deployment.workloads

    @property
    def dense_params(self) -> int:
        """Parameters of the dense targeted weights."""
        return sum(one.site.params for one in self.sites)

    @property
    def dense_ns(self) -> tuple[int | None, ...]:
        """Latency of the dense targeted weights, one a workload; None where the profile lacks a shape."""
        return summed_latency([one.dense for one in self.sites])

    @property
    def dense_perplexity(self) -> float:
        """On the calibration text."""
        return self.measured.perplexity(0.0)

    def taken(self, point: FrontierPoint) -> list[Candidate]:
        """The candidates that a point chooses, in the order of the sites."""
        return [one.options[chosen] for one, chosen in zip(self.sites, point.choice, strict=True)]

    def plan(self, index: int) -> Plan:
        """The plan of one point, as ``gac.allocate`` makes it for ``points[index].asked``.

        It has no alternatives: a frontier keeps only the candidates that some point chooses.

        Raises:
            IndexError: there is no such point.
        """
        point = self.points[index]
        by_params, proof = self.limit == PARAMS, point.certificate
        limits = Limits(point.asked) if by_params else Limits(1.0, latency={self.limit: point.asked})
        if not by_params:  # parameters are allowed in full, which costs nothing
            proof = replace(proof, multipliers=(0.0, *proof.multipliers))
        return assemble(
            [one.site for one in self.sites],
            self.taken(point),
            self.dense_ns,
            replace(self.recipe, limits=limits),
            self.measured,
            proof,
        )


def sums(options: Sequence[Candidate]) -> tuple[int, float, tuple[int | None, ...]]:
    """Parameters, loss, and latency for each workload of one candidate a site."""
    return sum(one.params for one in options), fsum(one.loss for one in options), summed_latency(options)


# --- checks: everything is counted again, in exact integers ---------------------------------------------------------


def _check(frontier: Frontier) -> None:
    if frontier.limit not in (PARAMS, *frontier.workloads):
        raise PlanError(
            f"frontier limits {frontier.limit!r}",
            f"params or one of its workloads ({', '.join(frontier.workloads) or 'none'})",
            _EDITED,
        )
    if not frontier.points:
        raise PlanError("frontier has no points", "one at least", _EDITED)
    for one in frontier.sites:
        for option in (one.dense, *one.options):
            check_candidate(option, one.site.weights, len(frontier.workloads), f"an option of site {one.site.name}")
    if not 1 <= frontier.dense_params <= frontier.measured.params:
        raise PlanError(
            f"frontier of {frontier.dense_params:,} targeted parameters of {frontier.measured.params:,}",
            "one at least, and no more than the model has",
            _EDITED,
        )
    amount = _dense_amount(frontier)
    for number, point in enumerate(frontier.points):
        _check_point(frontier, number, point, amount)
    for before, after in pairwise(frontier.points):
        if not (before.limit < after.limit and before.loss > after.loss):
            raise PlanError(
                f"points at {before.limit:,} and {after.limit:,} lose {before.loss:g} and {after.loss:g}",
                "a larger limit, and a smaller loss, from point to point",
                _EDITED,
            )


def _dense_amount(frontier: Frontier) -> int:
    """What the limits are fractions of."""
    if frontier.limit == PARAMS:
        return frontier.dense_params
    ns = frontier.dense_ns[frontier.workloads.index(frontier.limit)]
    if ns is None:
        raise PlanError(f"frontier limits {frontier.limit}, whose dense latency is unknown", "a known latency", _EDITED)
    return ns


def _check_point(frontier: Frontier, number: int, point: FrontierPoint, amount: int) -> None:
    if len(point.choice) != len(frontier.sites) or not all(
        0 <= chosen < len(one.options) for one, chosen in zip(frontier.sites, point.choice, strict=True)
    ):
        raise PlanError(f"point {number} chooses options that are not there", "one of each site's options", _EDITED)
    params, loss, latency = sums(frontier.taken(point))
    if (point.params, point.loss, point.latency_ns) != (params, loss, latency):
        raise PlanError(
            f"point {number} states {point.params} parameters, loss {point.loss!r} and latencies {point.latency_ns}",
            f"{params}, {loss!r} and {latency}, the sums of its options",
            _EDITED,
        )
    used = point.params if frontier.limit == PARAMS else latency[frontier.workloads.index(frontier.limit)]
    check_fraction("asked", point.asked)
    limit = floored(point.asked, amount)
    if point.limit != limit or used is None or used > limit:
        raise PlanError(f"point {number} states limit {point.limit} and uses {used}", f"at most {limit}", _EDITED)
    perplexity = frontier.measured.perplexity(point.loss)
    if not isclose(point.perplexity, perplexity):
        raise PlanError(f"point {number} states perplexity {point.perplexity:g}", f"{perplexity:g}", _EDITED)
