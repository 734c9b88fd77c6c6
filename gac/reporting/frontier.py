"""A frontier as a figure: predicted perplexity against sizes and against latency."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from gac.allocation.frontier_record import READABLE, Frontier, FrontierPoint
from gac.core.arguments import checked
from gac.core.errors import GacError, PlanError
from gac.core.words import number_of
from gac.plan.costs import COSTS, PARAMS
from gac.plan.plan import Plan
from gac.reporting.page import COLOURS, MARKERS, Axes, Figure, check_many, entry, legend_below, page, panel, time_unit

_COLOUR, _PLAN_COLOUR = COLOURS[:2]
_PLAN_MARKERS = ("*", *MARKERS[1:])


def axis_of(against: str, dense: float, *, steps: bool) -> tuple[float, str]:
    """The divisor of amounts or ns on an axis that reaches to the dense model, and the axis label with the unit.

    Args:
        steps: latencies are those of whole steps, not of the targeted weights alone.
    """
    cost = COSTS.get(against)
    scale, unit = time_unit(dense) if cost is None else cost.scale(dense)
    if cost is None:
        return scale, f"latency of {'a step' if steps else 'the targeted weights'} ({unit})"
    return scale, f"{cost.label}{' of the targeted weights' if cost.of_weights else ''} ({unit})"


def costs_of(plan: Plan) -> dict[str, int]:
    """The costs of a plan by column, and ns of each workload whose latency is known."""
    sizes = {name: plan.amount(name)[0] for name in COSTS}
    return sizes | {timed.workload: timed.plan_ns for timed in plan.workloads if timed.plan_ns is not None}


def curve(frontier: Frontier, against: str) -> list[tuple[int, FrontierPoint]]:
    """The readable points, each with its amount of a cost or ns of a workload, where that is known."""
    points = frontier.readable()
    if against in COSTS:
        return [(frontier.amount(point, against), point) for point in points]
    known = ((dict(zip(frontier.workloads, point.latency_ns, strict=True)).get(against), point) for point in points)
    return [(ns, point) for ns, point in known if ns is not None]


def cut_of(frontier: Frontier | None, plans: Mapping[str, Plan]) -> str:
    """Words for the points and plans above the end of the axis of perplexity; empty where there are none."""
    points = len(frontier.points) - len(frontier.readable()) if frontier is not None else 0
    above = [number_of(points, "point")] if points else []
    above += [name for name, plan in plans.items() if height_of(plan)[1]]
    return f"cut at {READABLE:g}x dense: {', '.join(above)} above" if above else ""


def height_of(plan: Plan) -> tuple[float, bool]:
    """The place of a plan on an axis of perplexity, which ends at 3 times the dense one, and if it is beyond that."""
    perplexity, top = plan.prediction.perplexity, READABLE * plan.prediction.dense_perplexity
    return min(perplexity, top), perplexity > top


def check_comparable(frontier: Frontier, other: Plan | Frontier, name: str) -> None:
    """Refuse a plan, or another frontier, for another model or calibrated on other text, so of another scale."""
    ours, theirs, kind = frontier.measured, other.measured, "plan" if isinstance(other, Plan) else "frontier"
    if theirs.digest != ours.digest:
        names = [f"{each.model} ({each.digest[:12]})" for each in (theirs, ours)]
        problem, expected = f"{kind} {name} for {' beside a frontier of '.join(names)}", f"a {kind} and a frontier"
        raise PlanError(problem, f"{expected} of the same model", "Use those that were made for the same weights.")
    text, expected = (f"{each.calibration} ({each.calibration.digest[:12]})" for each in (theirs, ours))
    if theirs.calibration != ours.calibration:
        expected = f"{expected}, as the frontier: perplexities on other text are of another scale"
        raise PlanError(f"{kind} {name}, calibrated on {text}", expected, "Make both with the same calibration.")


@checked
def figure_of_frontier(
    frontier: Frontier | str | Path,
    plans: Mapping[str, Plan | str | Path] | None = None,
    others: Mapping[str, Frontier | str | Path] | None = None,
) -> "Figure":
    """``plot_frontier`` against parameters, and the latency of each workload that is known.

    Also against bytes where numbers are rounded, and against the KV cache where that is limited.
    """
    frontier, plans = Frontier.opened(frontier), Plan.opened_each(plans or {})
    others, axes = Frontier.opened_each(others or {}), frontier.axes()
    measured, method = frontier.measured, frontier.recipe.measure.method
    with page(len(axes), f"{measured.model}, {method}, {measured.profile.gpu}") as (figure, panels):
        for ax, against in zip(panels, axes, strict=True):
            plot_frontier(frontier, plans, others, against=against, ax=ax)
    return figure


@checked
def plot_frontier(
    frontier: Frontier | str | Path,
    plans: Mapping[str, Plan | str | Path] | None = None,
    others: Mapping[str, Frontier | str | Path] | None = None,
    *,
    against: str = PARAMS,
    ax: "Axes | None" = None,
) -> "Axes":
    """Predicted perplexity of every point against a cost or its latency, with chosen plans among them.

    Args:
        plans: plans to mark, by the name to show; at most 6.
        others: other frontiers of the same model, by the name to show; at most 6.
        against: ``params``, ``bytes``, ``kv_numbers``, or one of the frontier's workloads.

    Raises:
        PlanError: a plan or another frontier is for another model, or was calibrated on other text.
        GacError: nothing is known of the workload, or there are more than 6 plans or frontiers.
    """
    frontier, plans = Frontier.opened(frontier), Plan.opened_each(plans or {})
    others = Frontier.opened_each(others or {})
    for kind, drawn in (("plans", plans), ("frontiers", others)):
        if drawn:
            check_many(len(drawn), kind)
        for name, record in drawn.items():
            check_comparable(frontier, record, name)
    axes = frontier.axes()
    if against not in axes:
        raise GacError(f"a frontier against {against!r}", f"one of {', '.join(axes)}", "Name one of these.")
    # one unit for the latencies of the whole figure
    largest = axes[against] if against in COSTS else max(ns or 0 for ns in frontier.dense_ns)
    rest = dict(zip(frontier.workloads, frontier.rest_ns, strict=True)).get(against)
    scale, label = axis_of(against, largest, steps=bool(rest))
    with panel(ax, (4.6, 3.2)) as ax:
        _plot(ax, frontier, against, axes[against], scale, plans)
        _plot_others(ax, others, against, scale)
        legend_below(ax, ncols=2, fontsize=6, handlelength=1.2)
        title = COSTS[against].label if against in COSTS else against
        cut = cut_of(frontier, plans)
        ax.set_title(fill(f"{title} ({cut})" if cut else title, 60), pad=4)
        ax.set_xlabel(label)
    return ax


def _plot(ax: "Axes", frontier: Frontier, against: str, dense: float, scale: float, plans: Mapping[str, Plan]) -> None:
    """The readable points, joined where they are limited along this axis, hollow where not proved; dense; plans."""
    from matplotlib.ticker import MaxNLocator

    points, limited = curve(frontier, against), frontier.limit == against
    x = np.array([amount / scale for amount, _ in points])
    perplexity = np.array([point.perplexity for _, point in points])
    proved = np.array([point.certificate.status == "optimal" for _, point in points])
    name = "least loss for each limit" if limited else f"the same choices, limited in {frontier.limit_label}"
    ax.plot(x, perplexity, "o", color=_COLOUR, ms=1.8, lw=0.9, ls="-" if limited else "none", label=name, zorder=2)
    if not proved.all():
        hollow: dict[str, Any] = {"mec": _COLOUR, "mfc": "white", "ms": 3.6, "ls": "none"}
        ax.plot(x[~proved], perplexity[~proved], "o", label="not proved in time", zorder=3, **hollow)
    dense_label = f"dense, {frontier.dense_perplexity:.2f}"
    ax.plot([dense / scale], [frontier.dense_perplexity], "D", color="black", ms=4, label=dense_label, zorder=4)
    look: dict[str, Any] = {"color": _PLAN_COLOUR, "mec": "black", "mew": 0.6, "ms": 7, "ls": "none"}
    for marker, (name, plan) in zip(_PLAN_MARKERS, plans.items(), strict=False):
        if (cost := costs_of(plan).get(against)) is not None:
            label = entry(f"{name}, {plan.prediction.perplexity:,.2f}")
            ax.plot([cost / scale], [height_of(plan)[0]], marker, label=label, zorder=5, **look)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.set_ylabel("predicted perplexity")


def _plot_others(ax: "Axes", frontiers: Mapping[str, Frontier], against: str, scale: float) -> None:
    looks = zip(cycle(COLOURS[2:]), (*MARKERS[1:], MARKERS[0]), frontiers.items(), strict=False)
    for colour, marker, (name, other) in looks:
        if points := curve(other, against):
            x, line = [amount / scale for amount, _ in points], "-" if other.limit == against else "none"
            look: dict[str, Any] = {"color": colour, "ms": 2.2, "lw": 0.9, "ls": line, "zorder": 1}
            ax.plot(x, [point.perplexity for _, point in points], marker, label=entry(name), **look)
