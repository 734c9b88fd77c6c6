"""A frontier as a table and as a figure: predicted perplexity against parameters and against latency."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group

from gac.allocation.frontier import PARAMS, Frontier, FrontierPoint
from gac.errors import GacError, PlanError
from gac.plan import Plan
from gac.reporting.figures.marks import COLOURS, MARKERS, check_many, entry
from gac.reporting.layout import legend, new_table
from gac.reporting.page import log_scale, page, panel, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = 12
_READABLE = 20.0
_COLOUR, _PLAN_COLOUR = COLOURS[:2]
_PLAN_MARKERS = ("*", *MARKERS[1:])


def readable(frontier: Frontier) -> list[FrontierPoint]:
    """The points with at most 20 times the dense perplexity: beyond, a prediction says only that the model is lost.

    All of them where there are none.
    """
    top = _READABLE * frontier.dense_perplexity
    return [point for point in frontier.points if point.perplexity <= top] or list(frontier.points)


def params_unit(dense: int) -> tuple[float, str]:
    """What to divide parameters by on an axis that reaches to the dense model, and what this makes of them."""
    return (1e9, "billions") if dense >= 1e9 else (1e6, "millions")


def cost_of(plan: Plan, name: str) -> int | None:
    """``params`` of a plan, or ns of a workload; None where that is not known."""
    latencies = {one.workload: one.plan_ns for one in plan.workloads}
    return plan.budget.used if name == PARAMS else latencies.get(name)


def costs_of(frontier: Frontier, name: str) -> list[int | None]:
    """``params`` of each readable point, or ns of a workload; None where that is not known."""
    if name == PARAMS:
        return [point.params for point in readable(frontier)]
    return [point.latency_ns[frontier.workloads.index(name)] for point in readable(frontier)]


def check_beside(frontier: Frontier, plan: Plan, name: str) -> None:
    """Refuse a plan whose predictions are of another scale than the frontier's.

    Args:
        name: how an error names the plan.

    Raises:
        PlanError: it is for another model, or was calibrated on other text.
    """
    made, ours = frontier.measured, plan.measured
    if ours.digest != made.digest:
        raise PlanError(
            f"plan {name} for {ours.model} ({ours.digest[:12]}) beside a frontier of {made.model} ({made.digest[:12]})",
            "a plan and a frontier of the same model",
            "Use those that were made for the same weights.",
        )
    ours_on, made_on = (
        f"{text.windows} x {text.window_tokens} tokens of {text.text} ({text.digest[:12]})"
        for text in (ours.calibration, made.calibration)
    )
    if ours.calibration != made.calibration:
        expected = f"{made_on}, as the frontier: perplexities on other text are of another scale"
        raise PlanError(f"plan {name}, calibrated on {ours_on}", expected, "Make both with the same calibration.")


def _limited(frontier: Frontier) -> str:
    return "parameters" if frontier.limit == PARAMS else f"latency on {frontier.limit}"


# --- the table ------------------------------------------------------------------------------------------------------


def frontier_table(frontier: Frontier) -> Group:
    """A dozen readable points: kept fraction, parameters, predicted perplexity, latency relative to dense."""
    columns = ["kept", "params", "loss", "perplexity", *frontier.workloads]
    table = new_table((column, ">") for column in columns)
    points = readable(frontier)
    limits = np.array([point.limit for point in points], dtype=np.float64)
    wanted = np.linspace(limits[0], limits[-1], _ROWS)
    for at in reversed(np.unique(np.abs(limits - wanted[:, None]).argmin(axis=1)).tolist()):
        point = points[at]
        kept = f"{point.params / frontier.dense_params:.4f}"
        ratios = (
            "-" if ns is None or dense is None else f"{ns / dense:.3f}x"
            for ns, dense in zip(point.latency_ns, frontier.dense_ns, strict=True)
        )
        table.add_row(kept, f"{point.params:,}", f"{point.loss:.4f}", f"{point.perplexity:,.2f}", *ratios)
    return Group(table, legend("\n".join(_notes(frontier))))


def _notes(frontier: Frontier) -> Iterator[str]:
    points, dense = frontier.points, frontier.dense_perplexity
    proved = sum(point.certificate.status == "optimal" for point in points)
    yield f"{len(points)} points, {proved} of them proved to lose least for their {_limited(frontier)}"
    yield f"loss (nats a token) and perplexity predicted on calibration text, {dense:.2f} dense; latency over dense"
    if lost := len(points) - len(readable(frontier)):
        yield f"not shown: {lost} smaller points, beyond {_READABLE:g} times the dense perplexity"
    unknown = [name for name, ns in zip(frontier.workloads, frontier.dense_ns, strict=True) if ns is None]
    if unknown:
        yield f"-: the profile lacks shapes for {' and '.join(unknown)} (gac profile --model ... measures them)"


# --- the figure -----------------------------------------------------------------------------------------------------


def figure_of_frontier(frontier: Frontier, plans: Mapping[str, Plan] | None = None) -> "Figure":
    """Perplexity against parameters, and against the latency of each workload that the profile knows.

    Args:
        plans: plans to mark in every panel, by the name to show.

    Raises:
        PlanError: a plan is for another model, or was calibrated on other text.
        GacError: matplotlib is missing, or there are more than 6 plans.
    """
    known = _dense_costs(frontier)
    made, method = frontier.measured, frontier.recipe.measure.method
    with page(len(known), f"{made.model}, {method}, {made.profile.gpu}") as (figure, axes):
        for ax, against in zip(axes, known, strict=True):
            plot_frontier(frontier, plans, against=against, ax=ax)
    return figure


def plot_frontier(
    frontier: Frontier, plans: Mapping[str, Plan] | None = None, *, against: str = PARAMS, ax: "Axes | None" = None
) -> "Axes":
    """Predicted perplexity of every point against its parameters, or its latency, with chosen plans among them.

    Args:
        plans: plans to mark, by the name to show; at most 6.
        against: ``params``, or one of the frontier's workloads.

    Raises:
        PlanError: a plan is for another model, or was calibrated on other text.
        GacError: matplotlib is missing, nothing is known of the workload, or there are more than 6 plans.
    """
    if plans:
        check_many(len(plans), "plans")
    for name, plan in (plans or {}).items():
        check_beside(frontier, plan, name)
    known = _dense_costs(frontier)
    if against not in known:
        raise GacError(f"a frontier against {against!r}", f"one of {', '.join(known)}", "Name one of these.")
    if against == PARAMS:
        scale, unit = params_unit(frontier.dense_params)
        lost = len(frontier.points) - len(readable(frontier))
        title = "parameters" + (f" ({lost} points beyond {_READABLE:g}x dense not shown)" if lost else "")
    else:  # one unit for the whole figure
        scale, unit = time_unit(max(ns or 0 for ns in frontier.dense_ns))
        title = against
    with panel(ax, (4.6, 3.2)) as ax:
        _plot(ax, frontier, against, known[against], scale, plans or {})
        ax.set_title(title, pad=4)
        ax.set_xlabel(f"{'parameters' if against == PARAMS else 'latency'} of the targeted weights ({unit})")
    return ax


def _dense_costs(frontier: Frontier) -> dict[str, int]:
    """What the dense model costs: ``params``, and ns of each workload that the profile knows."""
    latencies = zip(frontier.workloads, frontier.dense_ns, strict=True)
    return {PARAMS: frontier.dense_params, **{name: ns for name, ns in latencies if ns is not None}}


def _plot(ax: "Axes", frontier: Frontier, against: str, dense: float, scale: float, plans: Mapping[str, Plan]) -> None:
    """The readable points, joined where they are limited along this axis, hollow where not proved; dense; plans."""
    from matplotlib.ticker import MaxNLocator

    points, limited = readable(frontier), frontier.limit == against
    x = np.array([np.nan if cost is None else cost / scale for cost in costs_of(frontier, against)])
    perplexity = np.array([point.perplexity for point in points])
    proved = np.array([point.certificate.status == "optimal" for point in points])
    name = "least loss for each limit" if limited else f"the same choices, limited in {_limited(frontier)}"
    ax.plot(x, perplexity, "o", color=_COLOUR, ms=1.8, lw=0.9, ls="-" if limited else "none", label=name, zorder=2)
    if not proved.all():
        hollow: dict[str, Any] = {"mec": _COLOUR, "mfc": "white", "ms": 3.6, "ls": "none"}
        ax.plot(x[~proved], perplexity[~proved], "o", label="not proved in time", zorder=3, **hollow)
    at_dense = f"dense, {frontier.dense_perplexity:.2f}"
    ax.plot([dense / scale], [frontier.dense_perplexity], "D", color="black", ms=4, label=at_dense, zorder=4)
    look: dict[str, Any] = {"color": _PLAN_COLOUR, "mec": "black", "mew": 0.6, "ms": 7, "ls": "none"}
    for marker, (name, plan) in zip(_PLAN_MARKERS, plans.items(), strict=False):
        if (cost := cost_of(plan, against)) is not None:
            height = plan.prediction.perplexity
            ax.plot([cost / scale], [height], marker, label=entry(f"{name}, {height:.2f}"), zorder=5, **look)
    log_scale(ax)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.set_ylabel("predicted perplexity")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2, fontsize=6, handlelength=1.2)
