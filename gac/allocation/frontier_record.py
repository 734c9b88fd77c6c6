"""The record of a frontier: its points and the candidates that they choose among; all counts are checked on load."""

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
    """A site, its dense candidate, and those of its candidates that some point chooses."""

    site: Site
    dense: Candidate
    options: tuple[Candidate, ...]


@dataclass(frozen=True)
class FrontierPoint:
    """The choice of the least sum of losses within one limit.

    Attributes:
        asked: the limit as a fraction of the dense amount, as ``gac.allocate`` takes it.
        limit: ``floor(asked * dense amount)``, in parameters, bytes, numbers in the KV cache, or ns.
        params: parameters of the targeted weights.
        loss: predicted nats a token more than dense, with the loss beyond the sum.
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
        recipe: as for a plan; its limits are those of no point.
        measured: as for a plan.
        limit: ``params``, ``bytes``, ``kv_numbers``, or the one of the recipe's workloads whose latency is limited.
        sites: in model order.
        points: limits rise and sums of losses fall strictly. A limit whose best choice is that of a smaller one has no
            point.
        fused_ns: latency of the dense targeted weights with shared first GEMMs, one a workload; None where the profile
            lacks a shape; empty in files without it.
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
        return self.recipe.deployment.workloads

    @property
    def dense_params(self) -> int:
        return sum(options.site.params for options in self.sites)

    @property
    def dense_bytes(self) -> int:
        return sum(_sizes(options.site, options.dense)[BYTES] for options in self.sites)

    @property
    def dense_kv_numbers(self) -> int:
        """Numbers of 16 bits that the dense model's KV cache keeps of a token."""
        return sum(_sizes(options.site, options.dense)[KV_NUMBERS] for options in self.sites)

    @cached_property
    def _option_sizes(self) -> tuple[tuple[Mapping[str, int], ...], ...]:
        return tuple(tuple(_sizes(site.site, option) for option in site.options) for site in self.sites)

    def _sum(self, point: FrontierPoint, column: str) -> int:
        return sum(sizes[option][column] for sizes, option in zip(self._option_sizes, point.choice, strict=True))

    def bytes(self, point: FrontierPoint) -> int:
        return self._sum(point, BYTES)

    def kv_numbers(self, point: FrontierPoint) -> int:
        return self._sum(point, KV_NUMBERS)

    def bits(self, point: FrontierPoint) -> float:
        """Return the bits of a point's targeted weights for each dense parameter."""
        return 8 * self.bytes(point) / self.dense_params

    @property
    def dense_ns(self) -> tuple[int | None, ...]:
        """Latency of the dense targeted weights, one a workload; None where the profile lacks a shape."""
        return summed_latency([options.dense for options in self.sites])

    @property
    def dense_perplexity(self) -> float:
        return self.measured.perplexity(0.0)

    def taken(self, point: FrontierPoint) -> list[Candidate]:
        """Return the candidates that a point chooses, in the order of the sites."""
        return [options.options[option] for options, option in zip(self.sites, point.choice, strict=True)]

    @checked
    def plan(self, index: int) -> Plan:
        """Return the plan of one point, as ``gac.allocate`` makes it for ``points[index].asked``.

        It has no alternatives: a frontier keeps only the candidates that some point chooses.

        Raises:
            PlanError: there is no such point.
        """
        count = len(self.points)
        if not -count <= index < count:
            raise PlanError(f"point {index} of a frontier", f"one from 0 to {count - 1}", "Name one of these.")
        point = self.points[index]
        limits = {
            PARAMS: Limits(point.asked),
            BYTES: Limits(memory=point.asked, latency={}),
            KV_NUMBERS: Limits(1.0, kv_cache=point.asked, latency={}),
        }.get(self.limit) or Limits(1.0, latency={self.limit: point.asked})
        proof = point.certificate
        if self.limit != PARAMS and len(proof.multipliers) == 1:  # no choice has more parameters than dense
            proof = replace(proof, multipliers=(0.0, *proof.multipliers))
        return assemble(
            [options.site for options in self.sites],
            self.taken(point),
            (self.dense_ns, self.fused_ns or (None,) * len(self.workloads)),
            replace(self.recipe, limits=limits),
            self.measured,
            proof,
            beyond_sum=point.together,
        )


def sums(
    options: Sequence[Candidate], measured: Measured, beyond_sum: float
) -> tuple[int, float, tuple[int | None, ...]]:
    """Sum parameters, loss (with that of embedding and LM head), and latency for each workload of the candidates."""
    loss = fsum([*(option.loss for option in options), measured.lost_by_head, beyond_sum])
    return sum(option.params for option in options), loss, summed_latency(options)


def _sizes(site: Site, option: Candidate) -> Mapping[str, int]:
    choices = option.choices(site.weights)
    return {column: counted(choices, column)[0] for column in (BYTES, KV_NUMBERS)}


# --- checks: everything is counted again, in exact integers ---------------------------------------------------------


def _check(frontier: Frontier) -> None:
    known, targeted, fused = frontier.workloads, frontier.dense_params, frontier.fused_ns
    expected = f"{', '.join(COUNTED)} or one of its workloads ({', '.join(known) or 'none'})"
    check(frontier.limit in (*COUNTED, *known), f"frontier limits {frontier.limit!r}", expected)
    check(bool(frontier.points), "frontier has no points", "one at least")
    possible = len(fused) in (0, len(known)) and all(ns is None or ns > 0 for ns in fused)
    check(possible, f"frontier states fused_ns {fused}", "none, or a latency a workload")
    for options in frontier.sites:
        for option in (options.dense, *options.options):
            check_candidate(option, options.site.weights, len(known), f"an option of site {options.site.name}")
    stated = f"frontier of {targeted:,} targeted parameters of {frontier.measured.params:,}"
    check(1 <= targeted <= frontier.measured.params, stated, "one at least, and no more than the model has")
    dense = _amounts(frontier, targeted, frontier.dense_bytes, frontier.dense_kv_numbers, frontier.dense_ns)
    amount = dense[column_of(frontier.limit)]
    stated = f"frontier limits {frontier.limit}, whose dense latency is unknown"
    check(amount is not None, stated, "a known latency")
    assert amount is not None
    for number, point in enumerate(frontier.points):
        _check_point(frontier, f"point {number}", point, amount)
    for before, after in pairwise(frontier.points):
        losses = [point.certificate.value for point in (before, after)]
        stated = f"points at {before.limit:,} and {after.limit:,} lose {losses[0]:g} and {losses[1]:g}"
        falls = before.limit < after.limit and losses[0] > losses[1]
        check(falls, stated, "a larger limit, and a smaller sum of losses, from point to point")


def _amounts(
    frontier: Frontier, params: int, size: int, cached: int, latency: Sequence[int | None]
) -> dict[str, int | None]:
    known = dict(zip(map(column_of, frontier.workloads), latency, strict=True))
    return {PARAMS: params, BYTES: size, KV_NUMBERS: cached, **known}


def _check_point(frontier: Frontier, name: str, point: FrontierPoint, dense: int) -> None:
    counts, proof = [range(len(options.options)) for options in frontier.sites], point.certificate
    exist = len(point.choice) == len(counts) and all(map(range.__contains__, counts, point.choice))
    check(exist, f"{name} chooses options that do not exist", "one of each site's options")
    taken = frontier.taken(point)
    params, loss, latency = sums(taken, frontier.measured, point.together)
    stated = f"{name} states {point.params} parameters, loss {point.loss!r} and latencies {point.latency_ns}"
    agrees = (point.params, point.loss, point.latency_ns) == (params, loss, latency)
    check(agrees, stated, f"{params}, {loss!r} and {latency}, the sums of its options")
    check_fraction("asked", point.asked)
    limit = floored(point.asked, dense)
    amounts = _amounts(frontier, params, frontier.bytes(point), frontier.kv_numbers(point), latency)
    used = amounts[column_of(frontier.limit)]
    kept = point.limit == limit and used is not None and used <= limit
    check(kept, f"{name} states limit {point.limit} and uses {used}", f"at most {limit}")
    perplexity = frontier.measured.perplexity(loss)
    close = isclose(point.perplexity, perplexity)
    check(close, f"{name} states perplexity {point.perplexity:g}", f"{perplexity:g}")
    summed = fsum(option.loss for option in taken)
    limits = (1,) if frontier.limit == PARAMS else (1, 2)  # parameters may be limited too
    proved = isclose(proof.value, summed, rel_tol=1e-12) and len(proof.multipliers) in limits
    stated = f"{name} states a proof of {proof.value!r} with {len(proof.multipliers)} multipliers"
    check(proved, stated, f"{summed!r}, the sum of its options, and one for each limit")
    fits = params <= frontier.dense_params
    check(fits, f"{name} has {params:,} parameters", f"at most {frontier.dense_params:,}")
