"""A frontier as a table and as a figure: predicted perplexity against sizes and against latency."""

from collections.abc import Iterator, Mapping
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group

from gac.allocation.frontier import PARAMS, Frontier, FrontierPoint
from gac.core.arguments import checked
from gac.core.errors import GacError, PlanError
from gac.forms import DENSE
from gac.plan.costs import BYTES, KV_NUMBERS
from gac.plan.plan import Plan
from gac.plan.summary import FUSED
from gac.reporting.formatting import legend, new_table
from gac.reporting.page import COLOURS, MARKERS, check_many, entry, log_scale, page, panel, time_unit
from gac.schemes import DEFAULT_SCHEME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZES = {PARAMS: "parameters", BYTES: "bytes", KV_NUMBERS: "KV cache"}
"""What sizes are called, by their cost columns."""

_COLUMNS = {BYTES: ("bytes", "bits"), KV_NUMBERS: ("cache",)}
"""What the table says of a size besides, where it is drawn."""
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


def unit_of(against: str, dense: float) -> tuple[float, str]:
    """What to divide a size or ns by on an axis that reaches to the dense model, and the unit."""
    if against == KV_NUMBERS:
        return 1, "numbers a token"
    if against == BYTES:
        return (1e9, "GB") if dense >= 1e9 else (1e6, "MB")
    if against != PARAMS:
        return time_unit(dense)
    return (1e9, "billions") if dense >= 1e9 else (1e6, "millions")


def label_of(against: str, unit: str) -> str:
    """What an axis says of a size, or of a latency."""
    if against == KV_NUMBERS:
        return f"KV cache ({unit})"
    return f"{SIZES.get(against, 'latency')} of the targeted weights ({unit})"


def costs_of(plan: Plan) -> dict[str, int]:
    """The sizes of a plan by cost column, and ns of each workload whose latency is known."""
    sizes = {PARAMS: plan.budget.used, BYTES: plan.bytes[0], KV_NUMBERS: plan.kv_numbers[0]}
    return sizes | {one.workload: one.plan_ns for one in plan.workloads if one.plan_ns is not None}


def curve(frontier: Frontier, against: str) -> list[tuple[int, FrontierPoint]]:
    """The readable points, each with its size or ns of a workload; those where that is known."""
    known = ((_cost(frontier, point, against), point) for point in readable(frontier))
    return [(cost, point) for cost, point in known if cost is not None]


def _cost(frontier: Frontier, point: FrontierPoint, against: str) -> int | None:
    if against in SIZES:
        return {PARAMS: point.params, BYTES: frontier.bytes(point), KV_NUMBERS: frontier.kv_numbers(point)}[against]
    return dict(zip(frontier.workloads, point.latency_ns, strict=True)).get(against)


def axes_of(frontier: Frontier) -> dict[str, int]:
    """What it is drawn against, and how much of that the dense model takes.

    Bytes are left out where all numbers have 16 bits: they are as parameters then. So are the KV cache where it is not
    what is limited, and workloads of which one point at most has a known latency.
    """
    points, least = frontier.points, min(2, len(frontier.points))
    columns = zip(*(point.latency_ns for point in points), strict=True)
    unknown = [len(points) - column.count(None) < least for column in columns]
    found: dict[str, int] = {PARAMS: frontier.dense_params}
    if frontier.limit == BYTES or frontier.recipe.space.schemes != (DEFAULT_SCHEME,):
        found[BYTES] = frontier.dense_bytes
    if frontier.limit == KV_NUMBERS:
        found[KV_NUMBERS] = frontier.dense_kv_numbers
    dense = zip(frontier.workloads, frontier.dense_ns, unknown, strict=True)
    return found | {name: ns for name, ns, lacking in dense if ns is not None and not lacking}


def check_beside(frontier: Frontier, other: Plan | Frontier, name: str) -> None:
    """Refuse a plan, or another frontier, whose predictions are of another scale than the frontier's.

    Args:
        name: how an error names it.

    Raises:
        PlanError: it is for another model, or was calibrated on other text.
    """
    made, ours = frontier.measured, other.measured
    what = "plan" if isinstance(other, Plan) else "frontier"
    if ours.digest != made.digest:
        raise PlanError(
            f"{what} {name} for {ours.model} ({ours.digest[:12]}) beside a frontier of {made.model} "
            f"({made.digest[:12]})",
            f"a {what} and a frontier of the same model",
            "Use those that were made for the same weights.",
        )
    ours_on, made_on = (f"{text} ({text.digest[:12]})" for text in (ours.calibration, made.calibration))
    if ours.calibration != made.calibration:
        expected = f"{made_on}, as the frontier: perplexities on other text are of another scale"
        raise PlanError(f"{what} {name}, calibrated on {ours_on}", expected, "Make both with the same calibration.")


def _limited(frontier: Frontier) -> str:
    return SIZES.get(frontier.limit) or f"latency on {frontier.limit}"


# --- the table ------------------------------------------------------------------------------------------------------


def frontier_table(frontier: Frontier) -> Group:
    """A dozen readable points: kept fraction, sizes, bits, predicted perplexity, latency relative to dense."""
    sizes = ["kept", "params", *chain(*(_COLUMNS.get(against, ()) for against in axes_of(frontier)))]
    columns = [*sizes, "loss", "perplexity", *frontier.workloads]
    table = new_table((column, ">") for column in columns)
    points = readable(frontier)
    limits = np.array([point.limit for point in points], dtype=np.float64)
    wanted = np.linspace(limits[0], limits[-1], _ROWS)
    for at in reversed(np.unique(np.abs(limits - wanted[:, None]).argmin(axis=1)).tolist()):
        point = points[at]
        shown = {
            "kept": f"{point.params / frontier.dense_params:.4f}",
            "params": f"{point.params:,}",
            "bytes": f"{frontier.bytes(point):,}",
            "bits": f"{frontier.bits(point):.2f}",
            "cache": f"{frontier.kv_numbers(point) / (frontier.dense_kv_numbers or 1):.4f}",
        }
        ratios = (
            "-" if ns is None or dense is None else f"{ns / dense:.3f}x"
            for ns, dense in zip(point.latency_ns, frontier.dense_ns, strict=True)
        )
        table.add_row(*map(shown.get, sizes), f"{point.loss:.4f}", f"{point.perplexity:,.2f}", *ratios)
    return Group(table, legend("\n".join(_notes(frontier))))


def _notes(frontier: Frontier) -> Iterator[str]:
    points, dense = frontier.points, frontier.dense_perplexity
    proved = sum(point.certificate.status == "optimal" for point in points)
    yield f"{len(points)} points, {proved} of them proved to lose least for their {_limited(frontier)}"
    if BYTES in axes_of(frontier):
        yield "kept, params, bytes: of the targeted weights, with scales and zero points; bits for each dense parameter"
    if KV_NUMBERS in axes_of(frontier):
        yield f"cache: of the {frontier.dense_kv_numbers:,} numbers of 16 bits that the KV cache keeps of a token"
    yield f"loss (nats a token) and perplexity predicted on calibration text, {dense:.2f} dense; latency over dense"
    if fused := list(_over_dense(frontier)):
        yield f"{FUSED}, which loses nothing: {', '.join(f'{ratio:.3f}x at {name}' for name, ratio in fused)}"
    if lost := len(points) - len(readable(frontier)):
        yield f"not shown: {lost} smaller points, beyond {_READABLE:g} times the dense perplexity"
    unknown = [name for name, ns in zip(frontier.workloads, frontier.dense_ns, strict=True) if ns is None]
    if unknown:
        yield f"-: the profile lacks shapes for {' and '.join(unknown)} (gac profile --model ... measures them)"
    elif any(None in point.latency_ns for point in points):
        untimed = [option for one in frontier.sites for option in one.options if None in option.latency_ns]
        schemes = {scheme for option in untimed for scheme in option.schemes} - {DEFAULT_SCHEME}
        forms = {form for option in untimed for form in option.forms} - {DENSE.name}
        yield f"-: the profile has no {', '.join(sorted(schemes or forms))}"


def _over_dense(frontier: Frontier) -> Iterator[tuple[str, float]]:
    """What the dense model with shared GEMMs takes over the one without, by workload; where that is known and other."""
    if frontier.fused_ns:
        for name, fused, dense in zip(frontier.workloads, frontier.fused_ns, frontier.dense_ns, strict=True):
            if fused and dense and fused != dense:
                yield name, fused / dense


# --- the figure -----------------------------------------------------------------------------------------------------


@checked
def figure_of_frontier(
    frontier: Frontier | str | Path,
    plans: Mapping[str, Plan | str | Path] | None = None,
    beside: Mapping[str, Frontier | str | Path] | None = None,
) -> "Figure":
    """Perplexity against parameters, and the latency of each workload that is known.

    Also against bytes where numbers are rounded, and against the KV cache where that is limited.

    Args:
        plans: plans to mark in every panel, by the name to show.
        beside: other frontiers of the same model to draw in every panel, by the name to show.

    Raises:
        PlanError: a plan or another frontier is for another model, or was calibrated on other text.
        GacError: matplotlib is missing, or there are more than 6 plans or other frontiers.
    """
    frontier, plans = Frontier.opened(frontier), Plan.opened_each(plans or {})
    beside = Frontier.opened_each(beside or {})
    known = axes_of(frontier)
    made, method = frontier.measured, frontier.recipe.measure.method
    with page(len(known), f"{made.model}, {method}, {made.profile.gpu}") as (figure, axes):
        for ax, against in zip(axes, known, strict=True):
            plot_frontier(frontier, plans, beside, against=against, ax=ax)
    return figure


@checked
def plot_frontier(
    frontier: Frontier | str | Path,
    plans: Mapping[str, Plan | str | Path] | None = None,
    beside: Mapping[str, Frontier | str | Path] | None = None,
    *,
    against: str = PARAMS,
    ax: "Axes | None" = None,
) -> "Axes":
    """Predicted perplexity of every point against a size or its latency, with chosen plans among them.

    Args:
        plans: plans to mark, by the name to show; at most 6.
        beside: other frontiers of the same model, by the name to show; at most 6.
        against: ``params``, ``bytes``, ``kv_numbers``, or one of the frontier's workloads.

    Raises:
        PlanError: a plan or another frontier is for another model, or was calibrated on other text.
        GacError: matplotlib is missing, nothing is known of the workload, or there are more than 6 plans or frontiers.
    """
    frontier, plans = Frontier.opened(frontier), Plan.opened_each(plans or {})
    beside = Frontier.opened_each(beside or {})
    others: Mapping[str, Mapping[str, Plan | Frontier]] = {"plans": {**plans}, "frontiers": {**beside}}
    for what, many in others.items():
        if many:
            check_many(len(many), what)
        for name, other in many.items():
            check_beside(frontier, other, name)
    known = axes_of(frontier)
    if against not in known:
        raise GacError(f"a frontier against {against!r}", f"one of {', '.join(known)}", "Name one of these.")
    if against in SIZES:
        lost, largest = len(frontier.points) - len(readable(frontier)), known[against]
        title = SIZES[against] + (f" ({lost} points beyond {_READABLE:g}x dense not shown)" if lost else "")
    else:
        title, largest = against, max(ns or 0 for ns in frontier.dense_ns)
    scale, unit = unit_of(against, largest)  # one for the whole figure
    with panel(ax, (4.6, 3.2)) as ax:
        _plot(ax, frontier, against, known[against], scale, plans)
        _plot_beside(ax, beside, against, scale)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2, fontsize=6, handlelength=1.2)
        ax.set_title(title, pad=4)
        ax.set_xlabel(label_of(against, unit))
    return ax


def _plot(ax: "Axes", frontier: Frontier, against: str, dense: float, scale: float, plans: Mapping[str, Plan]) -> None:
    """The readable points, joined where they are limited along this axis, hollow where not proved; dense; plans."""
    from matplotlib.ticker import MaxNLocator

    points, limited = curve(frontier, against), frontier.limit == against
    x = np.array([cost / scale for cost, _ in points])
    perplexity = np.array([point.perplexity for _, point in points])
    proved = np.array([point.certificate.status == "optimal" for _, point in points])
    name = "least loss for each limit" if limited else f"the same choices, limited in {_limited(frontier)}"
    ax.plot(x, perplexity, "o", color=_COLOUR, ms=1.8, lw=0.9, ls="-" if limited else "none", label=name, zorder=2)
    if not proved.all():
        hollow: dict[str, Any] = {"mec": _COLOUR, "mfc": "white", "ms": 3.6, "ls": "none"}
        ax.plot(x[~proved], perplexity[~proved], "o", label="not proved in time", zorder=3, **hollow)
    at_dense = f"dense, {frontier.dense_perplexity:.2f}"
    ax.plot([dense / scale], [frontier.dense_perplexity], "D", color="black", ms=4, label=at_dense, zorder=4)
    if ratio := dict(_over_dense(frontier)).get(against):
        shared: dict[str, Any] = {"color": "black", "mfc": "white", "ms": 4, "ls": "none", "label": FUSED, "zorder": 4}
        ax.plot([ratio * dense / scale], [frontier.dense_perplexity], "D", **shared)
    look: dict[str, Any] = {"color": _PLAN_COLOUR, "mec": "black", "mew": 0.6, "ms": 7, "ls": "none"}
    for marker, (name, plan) in zip(_PLAN_MARKERS, plans.items(), strict=False):
        if (cost := costs_of(plan).get(against)) is not None:
            height = plan.prediction.perplexity
            ax.plot([cost / scale], [height], marker, label=entry(f"{name}, {height:.2f}"), zorder=5, **look)
    log_scale(ax)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.set_ylabel("predicted perplexity")


def _plot_beside(ax: "Axes", beside: Mapping[str, Frontier], against: str, scale: float) -> None:
    """The readable points of other frontiers whose cost is known, joined where they are limited along this axis."""
    looks = zip(cycle(COLOURS[2:]), (*MARKERS[1:], MARKERS[0]), beside.items(), strict=False)
    for colour, marker, (name, other) in looks:
        if points := curve(other, against):
            x, line = [cost / scale for cost, _ in points], "-" if other.limit == against else "none"
            look: dict[str, Any] = {"color": colour, "ms": 2.2, "lw": 0.9, "ls": line, "zorder": 1}
            ax.plot(x, [point.perplexity for _, point in points], marker, label=entry(name), **look)
