"""The frontier as drawings: places of marks and ticks, in the units of the picture."""

from collections.abc import Callable, Collection
from math import ceil, floor, log10
from typing import Any, NamedTuple

from gac.plan.costs import COSTS, PARAMS
from gac.plan.layers import lossy_schemes
from gac.reporting.frontier import axis_of, costs_of, curve, cut_of, height_of
from gac_extensions.report.sources import Sources

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 60, WIDTH - 14, 14, HEIGHT - 50  # the frame of the marks
_MARGIN, _TICKS = 0.06, 6
Ticks = list[tuple[float, str]]  # the place of each, and its number


class Mark(NamedTuple):
    """A plan on a chart; ``letter`` is its mark in the table of plans (P: the page's own; D: dense)."""

    letter: str
    x: float
    y: float
    words: str


def charts(sources: Sources) -> list[dict[str, Any]]:
    """One against the parameters, one for each other cost that matters, and one a workload that the plan knows.

    Other costs of the weights matter where numbers are rounded; every cost does where it is limited.
    """
    plan, drawn = sources.plan, sources.frontier.axes() if sources.frontier is not None else {}
    known = (timed.workload for timed in plan.workloads if timed.dense_ns and timed.plan_ns)
    limited = {PARAMS, *drawn, *(limit.column for limit in plan.limits)}
    lossy = bool(lossy_schemes(plan))
    costs = [name for name, cost in COSTS.items() if name in limited or (lossy and cost.of_weights)]
    return [_chart(sources, against) for against in (*costs, *known)]


def letter_of(number: int) -> str:
    """The letter of another plan: A, B, C, then numbers, for D is dense and P the plan."""
    return "ABC"[number] if number < 3 else str(number + 1)


def _chart(sources: Sources, against: str) -> dict[str, Any]:
    plan, frontier = sources.plan, sources.frontier
    times = {timed.workload: timed for timed in plan.workloads}
    dense = plan.amount(against)[1] if against in COSTS else times[against].dense_ns or 0
    scale, label = axis_of(against, dense, steps=against in times and bool(times[against].rest_ns))
    plans = [(letter_of(number), *other) for number, other in enumerate(sources.against.items())]
    perplexity = plan.prediction.dense_perplexity
    points = [("D", "dense", dense / scale, perplexity, perplexity)]
    shown = {}
    for letter, name, drawn in (*plans, ("P", sources.name, plan)):
        if (cost := costs_of(drawn).get(against)) is not None:
            points.append((letter, name, cost / scale, height_of(drawn)[0], drawn.prediction.perplexity))
            shown[letter] = drawn
    known = curve(frontier, against) if frontier is not None else []
    line = [(cost / scale, point.perplexity) for cost, point in known]
    costs, heights = zip(*(point[2:4] for point in points), *line, strict=True)
    x, x_ticks = _axis(costs, LEFT, RIGHT)
    y, y_ticks = _axis(heights, BOTTOM, TOP)
    return {
        "title": f"Perplexity against {COSTS[against].label if against in COSTS else f'latency, {against}'}",
        "cut": cut_of(frontier, shown),
        "x_label": label,
        "x_ticks": x_ticks,
        "y_ticks": y_ticks,
        "line": [(x(cost), y(height)) for cost, height in line],  # points of the frontier
        # where the frontier limits this cost, no choice has a smaller sum of losses for as little
        "joined": frontier is not None and frontier.limit == against,
        "marks": [
            Mark(letter, x(cost), y(height), f"{letter}, {name}: {cost:,.4g}, perplexity {perplexity:,.2f}")
            for letter, name, cost, height, perplexity in points
        ],
    }


def _axis(values: Collection[float], start: float, end: float) -> tuple[Callable[[float], float], Ticks]:
    """A map from numbers to places in the picture, with a margin on both sides, and ticks at round numbers."""
    room = _MARGIN * (max(values) - min(values)) or _MARGIN * abs(max(values)) or 1.0
    low, high = min(values) - room, max(values) + room

    def place(number: float) -> float:
        return round(start + (end - start) * (number - low) / (high - low), 1)

    rough = (high - low) / _TICKS
    size = 10.0 ** floor(log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    numbers = [round(step * i, 10) for i in range(ceil(low / step), floor(high / step) + 1)]
    return place, [(place(number), f"{number:,g}") for number in numbers]
