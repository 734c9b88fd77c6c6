"""The record of a frontier: its points and the candidates that they choose among, checked when made or loaded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import fsum, isclose
from typing import Any

import numpy as np

from gac.allocation.decide import assemble, summed_latency
from gac.core.arguments import checked
from gac.core.display import Row, Shown, Table, fields
from gac.core.errors import PlanError
from gac.core.io import Record
from gac.core.workloads import Workload
from gac.models.sites import Site
from gac.plan.choices import REMEDY
from gac.plan.costs import BYTES, COSTS, PARAMS, floored
from gac.plan.plan import Candidate, Certificate, Measured, Plan, check, check_candidate, counted
from gac.plan.recipe import Limits, Recipe, check_fraction
from gac.plan.summary import profile_command
from gac.schemes import DEFAULT_SCHEME

SCHEMA = 3

READABLE = 3.0
"""Times the dense perplexity, beyond which a model is of no use: tables and figures end there."""

_ROWS = 12


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
        loss: predicted nats a token more than dense, ``together`` included: the part beyond the sum over the sites.
        perplexity: predicted, on the calibration text; e**709 stands for anything larger.
        latency_ns: of the targeted weights, one a workload; None where the profile lacks a shape.
        choice: for each site the index of its option.
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
        limit: what is limited: ``params``, ``bytes``, ``kv_numbers``, or the one of the recipe's workloads whose
            latency is.
        sites: in model order.
        points: limits rise and sums of losses fall strictly. A limit that a smaller one's choice serves as well has no
            point.
        dense_ns: latency of the dense targeted weights as engines run them, with shared GEMMs, one a workload; None
            where the profile lacks a shape.
        rest_ns: the part of it beside the GEMMs of the targeted weights, which every point's latency has too.
    """

    schema_version: int
    gac_version: str
    recipe: Recipe
    measured: Measured
    limit: str
    sites: tuple[SiteOptions, ...]
    points: tuple[FrontierPoint, ...]
    dense_ns: tuple[int | None, ...]
    rest_ns: tuple[int, ...]
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
        return sum(options.site.params for options in self.sites)

    def dense_amount(self, column: str) -> int:
        return sum(_amounts(site.site, site.dense)[column] for site in self.sites)

    @cached_property
    def _sizes(self) -> tuple[tuple[Mapping[str, int], ...], ...]:
        return tuple(tuple(_amounts(site.site, option) for option in site.options) for site in self.sites)

    def amount(self, point: FrontierPoint, column: str) -> int:
        return sum(sizes[chosen][column] for sizes, chosen in zip(self._sizes, point.choice, strict=True))

    def bytes(self, point: FrontierPoint) -> int:
        return self.amount(point, BYTES)

    def bits(self, point: FrontierPoint) -> float:
        """Bits of the targeted weights for each dense parameter."""
        return 8 * self.bytes(point) / self.dense_params

    @property
    def dense_perplexity(self) -> float:
        """On the calibration text."""
        return self.measured.perplexity(0.0)

    def taken(self, point: FrontierPoint) -> list[Candidate]:
        return [site.options[chosen] for site, chosen in zip(self.sites, point.choice, strict=True)]

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
        if self.limit == PARAMS:
            limits = Limits(point.asked)
        elif self.limit in COSTS:
            costs: dict[str, Any] = {COSTS[self.limit].limit: point.asked}
            limits = Limits(1.0, latency={}, **costs)
        else:
            limits = Limits(1.0, latency={self.limit: point.asked})
        proof = point.certificate
        if self.limit != PARAMS and len(proof.multipliers) == 1:  # no choice has more parameters than dense
            proof = replace(proof, multipliers=(0.0, *proof.multipliers))
        return assemble(
            [site.site for site in self.sites],
            self.taken(point),
            self.dense_ns,
            self.rest_ns,
            replace(self.recipe, limits=limits),
            self.measured,
            proof,
            beyond_sum=point.together,
        )

    @property
    def limit_label(self) -> str:
        return COSTS[self.limit].label if self.limit in COSTS else f"latency on {self.limit}"

    def readable(self) -> list[FrontierPoint]:
        """The points with at most ``READABLE`` times the dense perplexity; all where there are none."""
        top = READABLE * self.dense_perplexity
        return [point for point in self.points if point.perplexity <= top] or list(self.points)

    def axes(self) -> dict[str, int]:
        """The costs and workloads that it is drawn against, with the dense model's amount or ns.

        Bytes are left out where all numbers have 16 bits: they are as parameters then. So are costs of the KV cache
        that are not limited, and workloads of which one point at most has a known latency.
        """
        drawn = {PARAMS, self.limit} | ({BYTES} if self.recipe.space.schemes != (DEFAULT_SCHEME,) else set())
        axes = {name: self.dense_amount(name) for name in COSTS if name in drawn}
        columns = zip(*(point.latency_ns for point in self.points), strict=True)
        for name, dense, latencies in zip(self.workloads, self.dense_ns, columns, strict=True):
            if dense is not None and len(latencies) - latencies.count(None) >= min(2, len(latencies)):
                axes[name] = dense
        return axes

    def tables(self) -> Sequence[Table | str]:
        """One table of a dozen readable points: sizes, predicted loss and perplexity, latency relative to dense."""
        points, axes = self.readable(), self.axes()
        limits = np.array([point.limit for point in points], dtype=np.float64)
        wanted = np.linspace(limits[0], limits[-1], _ROWS)
        shown = np.unique(np.abs(limits - wanted[:, None]).argmin(axis=1)).tolist()
        rows = [_cells(self, points[number], axes) for number in reversed(shown)]
        title = f"frontier of {self.measured.model}, {self.recipe.measure.method}, {self.measured.profile.gpu}"
        columns, cells = [(name, ">") for name in rows[0]], [[*row.values()] for row in rows]
        return [Table(columns, cells, title, "\n".join(_notes(self)))]

    def rows(self) -> Sequence[Row]:
        names = [f"latency_ns {name}" for name in self.workloads]
        return [
            {
                **fields(point, "asked", "limit", "params"),
                "kept": point.params / self.dense_params,
                "bytes": self.bytes(point),
                "bits": self.bits(point),
                **{name: self.amount(point, name) for name, cost in COSTS.items() if not cost.of_weights},
                **fields(point, "loss", "together", "perplexity"),
                **dict(zip(names, point.latency_ns, strict=True)),
                **fields(point.certificate, "status", "gap"),
            }
            for point in self.points
        ]


def point_of(
    fraction: float,
    limit: int,
    choice: tuple[int, ...],
    sites: Sequence[SiteOptions],
    measured: Measured,
    proof: Certificate,
    beyond_sum: float,
    rest_ns: Sequence[int],
) -> FrontierPoint:
    options = [site.options[chosen] for site, chosen in zip(sites, choice, strict=True)]
    loss = fsum([*(option.loss for option in options), measured.lost_by_head, beyond_sum])
    params, perplexity = sum(option.params for option in options), measured.perplexity(loss)
    latency_ns = summed_latency(options, rest_ns)
    return FrontierPoint(fraction, limit, params, loss, perplexity, latency_ns, choice, proof, beyond_sum)


def _amounts(site: Site, option: Candidate) -> Mapping[str, int]:
    choices = option.choices(site.weights)
    return {column: counted(choices, column)[0] for column in COSTS}


# --- the table ------------------------------------------------------------------------------------------------------


def _cells(frontier: Frontier, point: FrontierPoint, axes: Mapping[str, int]) -> dict[str, str]:
    cells = {"kept": f"{point.params / frontier.dense_params:.4f}", "params": f"{point.params:,}"}
    for name, dense in axes.items():
        if name == BYTES:
            cells |= {"bytes": f"{frontier.bytes(point):,}", "bits": f"{frontier.bits(point):.2f}"}
        elif name in COSTS and name != PARAMS:
            cells[COSTS[name].label] = f"{frontier.amount(point, name) / (dense or 1):.4f}"
    cells |= {"loss": f"{point.loss:.4f}", "perplexity": f"{point.perplexity:,.2f}"}
    times = zip(frontier.workloads, point.latency_ns, frontier.dense_ns, frontier.rest_ns, strict=True)
    for name, ns, dense_ns, rest_ns in times:
        cells[name] = "-" if ns is None or dense_ns is None else f"{ns / dense_ns:.3f}x"
        if rest_ns:
            cells[f"{name} tokens/s"] = "-" if ns is None else f"{Workload.parse(name).tokens_per_second(ns):,.0f}"
    return cells


def _notes(frontier: Frontier) -> Iterator[str]:
    points, axes = frontier.points, frontier.axes()
    proved = sum(point.certificate.status == "optimal" for point in points)
    yield f"{len(points)} points, {proved} of them proved to lose least for their {frontier.limit_label}"
    if BYTES in axes:
        yield "kept, params, bytes: of the targeted weights, with scales and zero points; bits for each dense parameter"
    for name, cost in COSTS.items():
        if name in axes and not cost.of_weights:
            yield f"{cost.label}: of the {axes[name]:,} {cost.unit} of the dense model"
    dense = frontier.dense_perplexity
    yield f"loss (nats a token) and perplexity predicted on calibration text, {dense:.2f} dense; latency over dense"
    steps = [step for step in zip(frontier.workloads, frontier.dense_ns, frontier.rest_ns, strict=True) if step[2]]
    if rates := [f"{Workload.parse(name).tokens_per_second(ns):,.0f} ({name})" for name, ns, _ in steps if ns]:
        yield f"tokens/s of whole steps in {frontier.recipe.deployment.engine}; dense {', '.join(rates)}"
    if lost := len(points) - len(frontier.readable()):
        yield f"not shown: {lost} smaller points, beyond {READABLE:g} times the dense perplexity"
    unknown = [name for name, ns in zip(frontier.workloads, frontier.dense_ns, strict=True) if ns is None]
    if unknown:
        command = profile_command(frontier.measured.model, frontier.recipe, *frontier.workloads)
        yield f"-: the profile lacks shapes for {' and '.join(unknown)}; measure them with {command}"
    elif any(None in point.latency_ns for point in points):
        untimed = [option for site in frontier.sites for option in site.options if None in option.latency_ns]
        schemes = {scheme for option in untimed for scheme in option.schemes} - {DEFAULT_SCHEME}
        forms = {form for option in untimed for form in option.forms} - {"dense"}
        yield f"-: the profile lacks shapes in {', '.join(sorted(schemes or forms))}"


# --- checks: everything is counted again, in exact integers ---------------------------------------------------------


def _check(frontier: Frontier) -> None:
    workloads, targeted, dense_ns = frontier.workloads, frontier.dense_params, frontier.dense_ns
    known = f"{', '.join(COSTS)} or one of its workloads ({', '.join(workloads) or 'none'})"
    check(frontier.limit in (*COSTS, *workloads), f"frontier limits {frontier.limit!r}", known)
    check(bool(frontier.points), "frontier has no points", "one at least")
    possible = len(dense_ns) == len(workloads) and all(ns is None or ns > 0 for ns in dense_ns)
    check(possible, f"frontier states dense_ns {dense_ns}", "a latency a workload")
    possible = len(frontier.rest_ns) == len(workloads) and min(frontier.rest_ns, default=0) >= 0
    check(possible, f"frontier states rest_ns {frontier.rest_ns}", "a latency a workload")
    for site in frontier.sites:
        for option in (site.dense, *site.options):
            check_candidate(option, site.site.weights, len(workloads), f"an option of site {site.site.name}")
    stated = f"frontier of {targeted:,} targeted parameters of {frontier.measured.params:,}"
    check(1 <= targeted <= frontier.measured.params, stated, "one at least, and no more than the model has")
    by_workload = dict(zip(workloads, dense_ns, strict=True))
    dense = frontier.dense_amount(frontier.limit) if frontier.limit in COSTS else by_workload[frontier.limit]
    if dense is None:
        raise PlanError(f"frontier limits {frontier.limit}, whose dense latency is unknown", "a known one", REMEDY)
    for number, point in enumerate(frontier.points):
        _check_point(frontier, f"point {number}", point, dense)
    for before, after in pairwise(frontier.points):
        summed = [point.certificate.value for point in (before, after)]
        stated = f"points at {before.limit:,} and {after.limit:,} lose {summed[0]:g} and {summed[1]:g}"
        rising = before.limit < after.limit and summed[0] > summed[1]
        check(rising, stated, "a larger limit, and a smaller sum of losses, from point to point")


def _check_point(frontier: Frontier, name: str, point: FrontierPoint, dense: int) -> None:
    indices = [range(len(site.options)) for site in frontier.sites]
    chosen = len(point.choice) == len(indices) and all(map(range.__contains__, indices, point.choice))
    check(chosen, f"{name} chooses options that are not there", "one of each site's options")
    check_fraction("asked", point.asked)
    asked, limit, proof = point.asked, floored(point.asked, dense), point.certificate
    summed = point_of(
        asked, limit, point.choice, frontier.sites, frontier.measured, proof, point.together, frontier.rest_ns
    )
    close = isclose(point.perplexity, summed.perplexity)
    for field in ("limit", "params", "loss", "latency_ns", *(() if close else ("perplexity",))):
        stated, expected = getattr(point, field), getattr(summed, field)
        reason = f"as asked={asked} says" if field == "limit" else "as its options say"
        check(stated == expected, f"{name} states {field} {stated}", f"{expected}, {reason}")
    by_workload = dict(zip(frontier.workloads, point.latency_ns, strict=True))
    used = frontier.amount(point, frontier.limit) if frontier.limit in COSTS else by_workload[frontier.limit]
    check(used is not None and used <= limit, f"{name} uses {used}", f"at most {limit}")
    least = fsum(option.loss for option in frontier.taken(point))
    multipliers = (1,) if frontier.limit == PARAMS else (1, 2)  # parameters may be limited beside it
    proved = proof.is_valid and isclose(proof.value, least, rel_tol=1e-12) and len(proof.multipliers) in multipliers
    problem = f"{name} states a proof of {proof.value!r} with {len(proof.multipliers)} multipliers"
    check(proved, problem, f"{least!r}, the sum of its options, and one for each limit")
    fits = point.params <= frontier.dense_params  # no choice has more than the dense model
    check(fits, f"{name} has {point.params:,} parameters", f"at most {frontier.dense_params:,}")
