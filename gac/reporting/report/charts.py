"""The frontier as drawings: where every mark and tick stands, in the units of the picture."""

from collections.abc import Callable, Iterable
from math import ceil, floor, log10
from typing import NamedTuple

from gac.allocation.frontier import PARAMS
from gac.plan.costs import BYTES, KV_NUMBERS
from gac.plan.summary import FUSED, rounding_of
from gac.reporting.frontier import SIZES, axes_of, costs_of, curve, label_of, unit_of
from gac.reporting.report.sources import Sources

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 56, WIDTH - 14, 14, HEIGHT - 44
"""Between which the marks stand."""

_MARGIN = 0.06
_TICKS = 5
_DECADES = (1, 2, 3, 5, 7)


Ticks = list[tuple[float, str]]
"""Where each stands, and its number."""


class Mark(NamedTuple):
    """A plan on a chart: ``letter`` is its mark in the table of plans (P: the page's own; D: dense; F: that, fused)."""

    letter: str
    x: float
    y: float
    words: str


class Chart(NamedTuple):
    """Predicted perplexity against one cost.

    Attributes:
        unit: of the cost, in the axis label.
        line: points of the frontier, ``x,y`` pairs; empty where there is none.
        joined: whether the frontier limits this cost, so that no choice has a smaller sum of losses for as little.
    """

    title: str
    unit: str
    x_ticks: Ticks
    y_ticks: Ticks
    line: list[tuple[float, float]]
    joined: bool
    marks: list[Mark]


def charts(sources: Sources) -> list[Chart]:
    """One against the parameters, and one a workload that the plan knows.

    Also one against bytes where numbers are rounded, and one against the KV cache where that is limited.
    """
    plan, drawn = sources.plan, axes_of(sources.frontier) if sources.frontier is not None else {}
    known = (one.workload for one in plan.workloads if one.dense_ns and one.plan_ns)
    counted = {PARAMS: True, BYTES: rounding_of(plan), KV_NUMBERS: plan.limit(KV_NUMBERS) is not None}
    sizes = [size for size, there in counted.items() if there or size in drawn]
    return [_chart(sources, against) for against in (*sizes, *known)]


def letter_of(at: int) -> str:
    """What stands for the other plans: A, B, ... (numbers beyond C, for D is dense and P the plan)."""
    return "ABC"[at] if at < 3 else str(at + 1)


def _chart(sources: Sources, against: str) -> Chart:
    """Perplexity against a size, or the latency of a workload."""
    plan, frontier = sources.plan, sources.frontier
    sizes = {PARAMS: plan.budget.total, BYTES: plan.bytes[1], KV_NUMBERS: plan.kv_numbers[1]}
    dense = (sizes | {one.workload: one.dense_ns or 0 for one in plan.workloads})[against]
    scale, unit = unit_of(against, dense)
    plans = [(letter_of(at), *other) for at, other in enumerate(sources.against.items())]
    points = [("D", "dense", dense / scale, plan.prediction.dense_perplexity)]
    fused = next((one.fused_ns for one in plan.workloads if one.workload == against), None)
    if fused is not None and fused != dense:
        points.append(("F", FUSED, fused / scale, plan.prediction.dense_perplexity))
    for letter, name, one in (*plans, ("P", sources.name, plan)):
        if (cost := costs_of(one).get(against)) is not None:
            points.append((letter, name, cost / scale, one.prediction.perplexity))
    known = curve(frontier, against) if frontier is not None else []
    line = [(cost / scale, point.perplexity) for cost, point in known]
    x, x_ticks = _axis([*(cost for _, _, cost, _ in points), *(cost for cost, _ in line)], LEFT, RIGHT)
    y, y_ticks = _axis([*(height for *_, height in points), *(height for _, height in line)], BOTTOM, TOP, log=True)
    return Chart(
        f"Perplexity against {SIZES.get(against) or f'latency, {against}'}",
        label_of(against, unit),
        x_ticks,
        y_ticks,
        [(x(cost), y(height)) for cost, height in line],
        frontier is not None and frontier.limit == against,
        [
            Mark(letter, x(cost), y(height), f"{letter}, {name}: {cost:,.4g}, perplexity {height:,.2f}")
            for letter, name, cost, height in points
        ],
    )


def _axis(
    numbers: Iterable[float], start: float, end: float, log: bool = False
) -> tuple[Callable[[float], float], Ticks]:
    """From numbers to places in the picture, with room on both sides of the numbers; and round numbers among them."""
    values = [log10(number) if log else number for number in numbers]
    room = _MARGIN * (max(values) - min(values)) or _MARGIN * abs(max(values)) or 1.0
    low, high = min(values) - room, max(values) + room

    def place(number: float) -> float:
        value = log10(number) if log else number
        return round(start + (end - start) * (value - low) / (high - low), 1)

    first, last = (10**low, 10**high) if log else (low, high)
    if log and high - low > 0.6:  # some of each decade
        steps = _DECADES if high - low < 2 else (1,)
        round_numbers = [step * 10.0**decade for decade in range(floor(low), ceil(high) + 1) for step in steps]
    else:  # a handful of even steps
        rough = (last - first) / _TICKS
        size = 10.0 ** floor(log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
        round_numbers = [round(step * at, 10) for at in range(ceil(first / step), floor(last / step) + 1)]
    return place, [(place(number), f"{number:,g}") for number in round_numbers if first <= number <= last]
