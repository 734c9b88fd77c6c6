"""The frontier as drawings: where every mark and tick stands, in the units of the picture."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import NamedTuple

from gac.allocation.frontier import PARAMS
from gac.reporting.frontier import cost_of, costs_of, params_unit, readable
from gac.reporting.page import time_unit
from gac.reporting.report.sources import Sources

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 56, WIDTH - 14, 14, HEIGHT - 44
"""Between which the marks stand."""

_MARGIN = 0.06
_TICKS = 5
_DECADES = (1, 2, 3, 5, 7)


class Tick(NamedTuple):
    at: float
    label: str


class Mark(NamedTuple):
    """A plan on a chart: ``letter`` is its mark in the table of plans (P: the page's own; D: dense)."""

    letter: str
    x: float
    y: float
    words: str


class Chart(NamedTuple):
    """Predicted perplexity against one cost.

    Attributes:
        unit: of the cost, in the axis label.
        line: points of the frontier, ``x,y`` pairs; empty where there is none.
        joined: whether the frontier limits this cost, so that its points bound everything below them.
    """

    title: str
    unit: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    line: list[tuple[float, float]]
    joined: bool
    marks: list[Mark]


def charts(sources: Sources) -> list[Chart]:
    """One against the parameters, one against the latency of each workload that the plan knows."""
    known = (one.workload for one in sources.plan.workloads if one.dense_ns and one.plan_ns)
    return [_chart(sources, against) for against in (PARAMS, *known)]


def letter_of(at: int) -> str:
    """What stands for the other plans: A, B, ... (numbers beyond C, for D is dense and P the plan)."""
    return "ABC"[at] if at < 3 else str(at + 1)


def _chart(sources: Sources, against: str) -> Chart:
    """Perplexity against ``params``, or the latency of a workload."""
    plan, frontier = sources.plan, sources.frontier
    dense = {one.workload: one.dense_ns or 0 for one in plan.workloads}.get(against, plan.budget.total)
    scale, unit = params_unit(dense) if against == PARAMS else time_unit(dense)
    plans = [(letter_of(at), *other) for at, other in enumerate(sources.against.items())]
    points = [("D", "dense", dense / scale, plan.prediction.dense_perplexity)]
    for letter, name, one in (*plans, ("P", sources.name, plan)):
        if (cost := cost_of(one, against)) is not None:
            points.append((letter, name, cost / scale, one.prediction.perplexity))
    line: list[tuple[float, float]] = []
    if frontier is not None and against in (PARAMS, *frontier.workloads):
        known = zip(costs_of(frontier, against), readable(frontier), strict=True)
        line = [(cost / scale, point.perplexity) for cost, point in known if cost is not None]
    x = _Axis.over([*(cost for _, _, cost, _ in points), *(cost for cost, _ in line)], LEFT, RIGHT)
    y = _Axis.over([*(height for *_, height in points), *(height for _, height in line)], BOTTOM, TOP, log=True)
    return Chart(
        f"Perplexity against {'parameters' if against == PARAMS else f'latency, {against}'}",
        f"{'parameters of the ' if against == PARAMS else ''}targeted weights ({unit})",
        x.ticks(),
        y.ticks(),
        [(x.place(cost), y.place(height)) for cost, height in line],
        frontier is not None and frontier.limit == against,
        [
            Mark(letter, x.place(cost), y.place(height), f"{letter}, {name}: {cost:,.4g}, perplexity {height:,.2f}")
            for letter, name, cost, height in points
        ],
    )


@dataclass(frozen=True)
class _Axis:
    """From numbers to places in the picture; ``low`` and ``high`` are logarithms where ``log``."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def over(cls, numbers: Iterable[float], start: float, end: float, log: bool = False) -> "_Axis":
        """With room on both sides of the numbers."""
        values = [log10(number) if log else number for number in numbers]
        low, high = min(values), max(values)
        room = _MARGIN * (high - low) or _MARGIN * abs(high) or 1.0
        return cls(low - room, high + room, start, end, log)

    def place(self, number: float) -> float:
        value = log10(number) if self.log else number
        return round(self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low), 1)

    def ticks(self) -> list[Tick]:
        """Round numbers: a handful of even steps, or where a logarithmic axis is long some of each decade."""
        low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
        if self.log and self.high - self.low > 0.6:
            steps = _DECADES if self.high - self.low < 2 else (1,)
            decades = range(floor(self.low), ceil(self.high) + 1)
            numbers = [step * 10.0**decade for decade in decades for step in steps]
        else:
            rough = (high - low) / _TICKS
            size = 10.0 ** floor(log10(rough))
            step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
            numbers = [round(step * at, 10) for at in range(ceil(low / step), floor(high / step) + 1)]
        return [Tick(self.place(number), f"{number:,g}") for number in numbers if low <= number <= high]
