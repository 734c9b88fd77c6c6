"""The frontier as drawings: where every mark and tick stands, in the units of the picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import NamedTuple

from gac.allocation.frontier import PARAMS
from gac.reporting.frontier import cost_of, costs_of, params_unit, readable
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
    told: str


@dataclass(frozen=True)
class Chart:
    """Predicted perplexity against one cost.

    Attributes:
        unit: of the cost, in the axis label.
        line: points of the frontier, ``x,y`` pairs; empty where there is none.
        joined: whether the frontier limits this cost, so that its points bound everything below them.
    """

    title: str
    unit: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    line: tuple[tuple[float, float], ...]
    joined: bool
    marks: tuple[Mark, ...]


def charts(sources: Sources) -> tuple[Chart, ...]:
    """One against the parameters, one against the latency of each workload that the plan knows."""
    workloads = sources.plan.plan.workloads
    return tuple(
        _chart(sources, name) for name in (PARAMS, *(w.workload for w in workloads if w.dense_ns and w.plan_ns))
    )


def letter_of(at: int) -> str:
    """What stands for the other plans: A, B, ... (numbers beyond C, for D is dense and P the plan)."""
    return "ABC"[at] if at < 3 else str(at + 1)


def _chart(sources: Sources, against: str) -> Chart:
    """Perplexity against ``params``, or the latency of a workload."""
    plan, frontier = sources.plan.plan, sources.frontier
    dense = {one.workload: one.dense_ns or 0 for one in plan.workloads}.get(against, plan.budget.total)
    if against == PARAMS:
        scale, unit = params_unit(dense)
        title, axis = "parameters", f"parameters of the targeted weights ({unit})"
    else:
        scale, unit = (1e6, "ms") if dense >= 1e6 else (1e3, "µs")
        title, axis = f"latency, {against}", f"targeted weights ({unit})"
    plans = [*((letter_of(at), other) for at, other in enumerate(sources.against)), ("P", sources.plan)]
    points = [("D", "dense", dense / scale, plan.prediction.dense_perplexity)]
    points += [
        (letter, one.name, cost / scale, one.plan.prediction.perplexity)
        for letter, one in plans
        if (cost := cost_of(one.plan, against)) is not None
    ]
    line: list[tuple[float, float]] = []
    if frontier is not None and against in (PARAMS, *frontier.workloads):
        known = zip(costs_of(frontier, against), readable(frontier), strict=True)
        line = [(cost / scale, point.perplexity) for cost, point in known if cost is not None]
    x = _Axis.over([*(cost for _, _, cost, _ in points), *(cost for cost, _ in line)], LEFT, RIGHT)
    y = _Axis.over([*(height for *_, height in points), *(height for _, height in line)], BOTTOM, TOP, log=True)
    return Chart(
        f"Perplexity against {title}",
        axis,
        x.ticks(),
        y.ticks(),
        tuple((x.place(cost), y.place(height)) for cost, height in line),
        frontier is not None and frontier.limit == against,
        tuple(
            Mark(letter, x.place(cost), y.place(height), f"{letter}, {name}: {cost:,.4g}, perplexity {height:,.2f}")
            for letter, name, cost, height in points
        ),
    )


@dataclass(frozen=True)
class _Axis:
    """From numbers to places in the picture."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def over(cls, numbers: Sequence[float], start: float, end: float, log: bool = False) -> "_Axis":
        """With room on both sides of the numbers."""
        low, high = (log10(bound) if log else bound for bound in (min(numbers), max(numbers)))
        room = _MARGIN * (high - low) or _MARGIN * abs(high) or 1.0
        return cls(low - room, high + room, start, end, log)

    def place(self, number: float) -> float:
        value = log10(number) if self.log else number
        return round(self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low), 1)

    def ticks(self) -> tuple[Tick, ...]:
        numbers = self._even(10**self.low, 10**self.high) if self.log else self._even(self.low, self.high)
        if self.log and self.high - self.low > 0.6:
            decades = range(floor(self.low), ceil(self.high) + 1)
            numbers = [step * 10.0**decade for decade in decades for step in _DECADES]
            numbers = numbers if self.high - self.low < 2 else [10.0**decade for decade in decades]
        inside = [number for number in numbers if self._holds(number)]
        return tuple(Tick(self.place(number), f"{number:,g}") for number in inside)

    def _holds(self, number: float) -> bool:
        value = log10(number) if self.log else number
        return self.low <= value <= self.high

    @staticmethod
    def _even(low: float, high: float) -> list[float]:
        """Round numbers, a handful of them."""
        rough = (high - low) / _TICKS
        size = 10.0 ** floor(log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
        return [round(step * at, 10) for at in range(ceil(low / step), floor(high / step) + 1)]
