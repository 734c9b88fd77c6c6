"""The frontier as drawings: where every mark and tick stands, in the units of the picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from gac.allocation.frontier import PARAMS
from gac.reporting.frontier import params_unit, readable
from gac.reporting.report.sources import Sources

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 56, WIDTH - 14, 14, HEIGHT - 44
"""Between which the marks stand."""

_MARGIN = 0.06
_TICKS = 5
_DECADES = (1, 2, 3, 5, 7)


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Mark:
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


@dataclass(frozen=True)
class _Point:
    letter: str
    name: str
    cost: float
    perplexity: float


def charts(sources: Sources) -> tuple[Chart, ...]:
    """One against the parameters, one against the latency of each workload that the plan knows."""
    plan = sources.plan.plan
    found = [_params(sources)]
    found += [_latency(sources, at) for at, one in enumerate(plan.workloads) if one.dense_ns and one.plan_ns]
    return tuple(found)


def letter_of(at: int) -> str:
    """What stands for the other plans: A, B, ... (numbers beyond C, for D is dense and P the plan)."""
    return "ABC"[at] if at < 3 else str(at + 1)


def _params(sources: Sources) -> Chart:
    plan, frontier = sources.plan.plan, sources.frontier
    scale, unit = params_unit(plan.budget.total)
    points = [_Point("D", "dense", plan.budget.total / scale, plan.prediction.dense_perplexity)]
    points += [
        _Point(letter_of(at), other.name, other.plan.budget.used / scale, other.plan.prediction.perplexity)
        for at, other in enumerate(sources.against)
    ]
    points.append(_Point("P", sources.plan.name, plan.budget.used / scale, plan.prediction.perplexity))
    line = [(point.params / scale, point.perplexity) for point in readable(frontier)] if frontier else []
    joined = frontier is not None and frontier.limit == PARAMS
    axis = f"parameters of the targeted weights ({unit})"
    return _chart("Perplexity against parameters", axis, points, line, joined)


def _latency(sources: Sources, at: int) -> Chart:
    plan, frontier = sources.plan.plan, sources.frontier
    own = plan.workloads[at]
    assert own.dense_ns is not None
    assert own.plan_ns is not None
    scale, unit = (1e6, "ms") if own.dense_ns >= 1e6 else (1e3, "µs")
    points = [_Point("D", "dense", own.dense_ns / scale, plan.prediction.dense_perplexity)]
    for number, other in enumerate(sources.against):
        theirs = {one.workload: one.plan_ns for one in other.plan.workloads}.get(own.workload)
        if theirs is not None:
            points.append(_Point(letter_of(number), other.name, theirs / scale, other.plan.prediction.perplexity))
    points.append(_Point("P", sources.plan.name, own.plan_ns / scale, plan.prediction.perplexity))
    line: list[tuple[float, float]] = []
    if frontier is not None and own.workload in frontier.workloads:
        column = frontier.workloads.index(own.workload)
        known = ((point.latency_ns[column], point.perplexity) for point in readable(frontier))
        line = [(ns / scale, perplexity) for ns, perplexity in known if ns is not None]
    joined = frontier is not None and frontier.limit == own.workload
    return _chart(f"Perplexity against latency, {own.workload}", f"targeted weights ({unit})", points, line, joined)


def _chart(title: str, unit: str, points: Sequence[_Point], line: Sequence[tuple[float, float]], joined: bool) -> Chart:
    x = _Axis.over([*(point.cost for point in points), *(cost for cost, _ in line)], LEFT, RIGHT)
    heights = [*(point.perplexity for point in points), *(perplexity for _, perplexity in line)]
    y = _Axis.over(heights, BOTTOM, TOP, log=True)
    marks = [Mark(point.letter, x.place(point.cost), y.place(point.perplexity), _told(point)) for point in points]
    return Chart(
        title,
        unit,
        x.ticks(),
        y.ticks(),
        tuple((x.place(cost), y.place(perplexity)) for cost, perplexity in line),
        joined,
        tuple(marks),
    )


def _told(point: _Point) -> str:
    return f"{point.letter}, {point.name}: {point.cost:,.4g}, perplexity {point.perplexity:,.2f}"


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
