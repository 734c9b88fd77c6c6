"""The record of a frontier: its points, and the candidates that they choose among; counted again when read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import fsum, isclose

from gac.allocation.decide import assemble, summed_latency
from gac.core.arguments import checked
from gac.core.display import Shown
from gac.core.errors import PlanError
from gac.core.io import Record
from gac.models.sites import Site
from gac.plan.costs import BYTES, COUNTED, KV_NUMBERS, PARAMS, column_of, floored
from gac.plan.plan import Candidate, Certificate, Measured, Plan, check, check_candidate, counted
from gac.plan.recipe import Limits, Recipe, check_fraction

SCHEMA = 2


@dataclass(frozen=True)
class SiteOptions:
    """A site as it is, and those of its candidates that some point chooses."""

    site: Site
    dense: Candidate
    options: tuple[Candidate, ...]


@dataclass(frozen=True)
class FrontierPoint:
    """The choice whose sum of losses is least within one limit.

    Attributes:
        asked: the limit as a fraction of the dense amount; ``gac.allocate`` takes it as it is.
        limit: ``floor(asked * dense amount)``, in parameters, bytes, numbers in the KV cache, or ns.
        params: parameters of the targeted weights.
        loss: predicted nats a token more than dense, with what choices lose together.
        perplexity: predicted, on the calibration text; e**709 stands for anything larger.
        latency_ns: of the targeted weights, one a workload; None where the profile lacks a shape.
        choice: for each site the index of its option.
        certificate: the proof for this limit.
        together: the part of the loss beyond the sum over the sites, as in ``gac.plan.plan.Prediction``.
    """

    asked: float
    limit: int
    params: int
    loss: float
    perplexity: float
    latency_ns: tuple[int | None, ...]
    choice: tuple[int, ...]
    certificate: Certificate
    together: float = 0.0


@dataclass(frozen=True, repr=False)
class Frontier(Shown, Record):
    """The least loss for every budget from the smallest one that can be met.

    Attributes:
        recipe: what was asked for, as for a plan; its limits are those of no point.
        measured: as for a plan.
        limit: what is limited: ``params``, ``bytes``, ``kv_numbers``, or the one of the recipe's workloads whose
            latency is.
        sites: in model order.
        points: limits rise and sums of losses fall strictly. A limit that a smaller one's choice serves as well has no
            point.
        fused_ns: latency of the dense targeted weights with shared first GEMMs, one a workload; None where the profile
            lacks a shape; empty where a file does not say it.
    """

    schema_version: int
    gac_version: str
    recipe: Recipe
    measured: Measured
    limit: str
    sites: tuple[SiteOptions, ...]
    points: tuple[FrontierPoint, ...]
    fused_ns: tuple[int | None, ...] = ()
    _error, _indent = PlanError, None

    def __post_init__(self) -> None:
        self._check_schema(self.schema_version, SCHEMA)
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
    def dense_bytes(self) -> int:
        """Bytes of the dense targeted weights in 16 bits."""
        return sum(_counted(one.site, one.dense)[BYTES] for one in self.sites)

    @property
    def dense_kv_numbers(self) -> int:
        """Numbers of 16 bits that the dense model's KV cache keeps of a token."""
        return sum(_counted(one.site, one.dense)[KV_NUMBERS] for one in self.sites)

    @cached_property
    def _sizes(self) -> tuple[tuple[Mapping[str, int], ...], ...]:
        """What each site's options take, by cost column."""
        return tuple(tuple(_counted(one.site, option) for option in one.options) for one in self.sites)

    def _sum(self, point: FrontierPoint, column: str) -> int:
        return sum(sizes[chosen][column] for sizes, chosen in zip(self._sizes, point.choice, strict=True))

    def bytes(self, point: FrontierPoint) -> int:
        """Bytes of the targeted weights as a point chooses, scales and zero points among them."""
        return self._sum(point, BYTES)

    def kv_numbers(self, point: FrontierPoint) -> int:
        """Numbers of 16 bits that the KV cache keeps of a token as a point chooses."""
        return self._sum(point, KV_NUMBERS)

    def bits(self, point: FrontierPoint) -> float:
        """Those in bits, for each dense parameter."""
        return 8 * self.bytes(point) / self.dense_params

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

    @checked
    def plan(self, index: int) -> Plan:
        """The plan of one point, as ``gac.allocate`` makes it for ``points[index].asked``.

        It has no alternatives: a frontier keeps only the candidates that some point chooses.

        Raises:
            PlanError: there is no such point.
        """
        count = len(self.points)
        if not -count <= index < count:
            raise PlanError(f"point {index} of a frontier", f"one from 0 to {count - 1}", "Name one of these.")
        point = self.points[index]
        by_params, proof = self.limit == PARAMS, point.certificate
        if by_params:
            limits = Limits(point.asked)
        elif self.limit == BYTES:
            limits = Limits(memory=point.asked, latency={})
        elif self.limit == KV_NUMBERS:
            limits = Limits(1.0, kv_cache=point.asked, latency={})
        else:
            limits = Limits(1.0, latency={self.limit: point.asked})
        if not by_params and len(proof.multipliers) == 1:  # no choice has more parameters than dense
            proof = replace(proof, multipliers=(0.0, *proof.multipliers))
        return assemble(
            [one.site for one in self.sites],
            self.taken(point),
            (self.dense_ns, self.fused_ns or (None,) * len(self.workloads)),
            replace(self.recipe, limits=limits),
            self.measured,
            proof,
            together=point.together,
        )


def sums(
    options: Sequence[Candidate], measured: Measured, together: float
) -> tuple[int, float, tuple[int | None, ...]]:
    """Parameters, loss with that of embedding and head, and latency for each workload of one candidate a site."""
    loss = fsum([*(one.loss for one in options), measured.lost_by_head, together])
    return sum(one.params for one in options), loss, summed_latency(options)


def _counted(site: Site, option: Candidate) -> Mapping[str, int]:
    choices = option.choices(site.weights)
    return {column: counted(choices, column)[0] for column in (BYTES, KV_NUMBERS)}


# --- checks: everything is counted again, in exact integers ---------------------------------------------------------


def _check(frontier: Frontier) -> None:
    known, targeted = frontier.workloads, frontier.dense_params
    check(
        frontier.limit in (*COUNTED, *known),
        f"frontier limits {frontier.limit!r}",
        f"{', '.join(COUNTED)} or one of its workloads ({', '.join(known) or 'none'})",
    )
    check(bool(frontier.points), "frontier has no points", "one at least")
    fused = frontier.fused_ns
    possible = len(fused) in (0, len(known)) and all(ns is None or ns > 0 for ns in fused)
    check(possible, f"frontier states fused_ns {fused}", "none, or a latency a workload")
    for one in frontier.sites:
        for option in (one.dense, *one.options):
            check_candidate(option, one.site.weights, len(known), f"an option of site {one.site.name}")
    check(
        1 <= targeted <= frontier.measured.params,
        f"frontier of {targeted:,} targeted parameters of {frontier.measured.params:,}",
        "one at least, and no more than the model has",
    )
    dense = _amounts(frontier, targeted, frontier.dense_bytes, frontier.dense_kv_numbers, frontier.dense_ns)
    amount = dense[column_of(frontier.limit)]
    given = f"frontier limits {frontier.limit}, whose dense latency is unknown"
    check(amount is not None, given, "a known latency")
    assert amount is not None
    for number, point in enumerate(frontier.points):
        _check_point(frontier, f"point {number}", point, amount)
        _check_proof(frontier, f"point {number}", point)
    for before, after in pairwise(frontier.points):
        summed = [point.certificate.value for point in (before, after)]
        check(
            before.limit < after.limit and summed[0] > summed[1],
            f"points at {before.limit:,} and {after.limit:,} lose {summed[0]:g} and {summed[1]:g}",
            "a larger limit, and a smaller sum of losses, from point to point",
        )


def _amounts(
    frontier: Frontier, params: int, size: int, cached: int, latency: Sequence[int | None]
) -> dict[str, int | None]:
    """What may be limited, by its cost column."""
    known = dict(zip(map(column_of, frontier.workloads), latency, strict=True))
    return {PARAMS: params, BYTES: size, KV_NUMBERS: cached, **known}


def _check_point(frontier: Frontier, name: str, point: FrontierPoint, amount: int) -> None:
    """``amount``: what limits are fractions of."""
    there = [range(len(one.options)) for one in frontier.sites]
    chosen = len(point.choice) == len(there) and all(map(range.__contains__, there, point.choice))
    check(chosen, f"{name} chooses options that are not there", "one of each site's options")
    params, loss, latency = sums(frontier.taken(point), frontier.measured, point.together)
    check(
        (point.params, point.loss, point.latency_ns) == (params, loss, latency),
        f"{name} states {point.params} parameters, loss {point.loss!r} and latencies {point.latency_ns}",
        f"{params}, {loss!r} and {latency}, the sums of its options",
    )
    check_fraction("asked", point.asked)
    limit = floored(point.asked, amount)
    taken = _amounts(frontier, params, frontier.bytes(point), frontier.kv_numbers(point), latency)
    used = taken[column_of(frontier.limit)]
    kept = point.limit == limit and used is not None and used <= limit
    check(kept, f"{name} states limit {point.limit} and uses {used}", f"at most {limit}")
    perplexity = frontier.measured.perplexity(loss)
    close = isclose(point.perplexity, perplexity)
    check(close, f"{name} states perplexity {point.perplexity:g}", f"{perplexity:g}")


def _check_proof(frontier: Frontier, name: str, point: FrontierPoint) -> None:
    """That the proof is of this choice, and that parameters are within the dense model's."""
    proof, summed = point.certificate, fsum(option.loss for option in frontier.taken(point))
    limits = (1,) if frontier.limit == PARAMS else (1, 2)  # parameters may be limited beside it
    proved = isclose(proof.value, summed, rel_tol=1e-12) and len(proof.multipliers) in limits
    given = f"{name} states a proof of {proof.value!r} with {len(proof.multipliers)} multipliers"
    check(proved, given, f"{summed!r}, the sum of its options, and one for each limit")
    fits = point.params <= frontier.dense_params
    check(fits, f"{name} has {point.params:,} parameters", f"at most {frontier.dense_params:,}")
