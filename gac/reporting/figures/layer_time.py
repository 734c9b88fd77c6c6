"""Where the time of a layer goes: the weights of the dense model and of plans, side by side."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gac.allocation.latencies import UNKNOWN, Timing
from gac.errors import PlanError, ProfileError
from gac.forms import form_named
from gac.plan import Plan, WeightChoice
from gac.profiling.table import Profile
from gac.reporting.figures.dims import check_plans
from gac.reporting.figures.marks import HATCHES, MAP
from gac.reporting.page import panel, time_unit
from gac.reporting.tables import weights_by_layer
from gac.workloads import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def layer_time(
    plans: Mapping[str, Plan],
    profile: Profile,
    workload: str | None = None,
    *,
    layer: int | None = None,
    title: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Measured or interpolated bf16 latency of each targeted weight: a bar of the dense model, and one for each plan.

    Args:
        plans: by the name to show, all for one model; at most 6.
        workload: ``prefill:1x1024`` and the like; None takes the first that the first plan was made for.
        layer: one decoder layer; None sums over all.

    Raises:
        PlanError: the plans are for different models or run fused, or there is no such layer.
        ProfileError: the profile lacks a shape.
        GacError: matplotlib is missing, the workload is malformed, or there are no plans or more than 6.
    """
    first = check_plans(plans)
    if workload is None:
        if not first.workloads:
            given = f"plan for {first.measured.model} names no workload"
            raise PlanError(given, "one, to look latencies up for", "Name one.")
        workload = first.workloads[0].workload
    timing = Timing(profile, (Workload.parse(workload),))
    bars = {"dense": _latencies(first, timing, layer, dense=True)}
    for name, plan in plans.items():
        if plan.recipe.deployment.fuse:
            given = f"plan {name}, whose weights share their first GEMMs"
            raise PlanError(given, "a plan in which each weight runs by itself", "Plan without fuse.")
        own = replace(timing, triton=plan.recipe.deployment.triton)
        bars[name] = _latencies(plan, own, layer, dense=False)
    with panel(ax, (6.2, 1.4 + 0.36 * len(bars))) as ax:
        _draw(ax, list(bars), list(bars.values()))
        where = "all layers" if layer is None else f"layer {layer}"
        words = f"{first.measured.model}, {where}, {timing.workloads[0]}, {profile.header.gpu}"
        ax.set_title(words if title is None else title, pad=4)
    return ax


def _latencies(plan: Plan, timing: Timing, layer: int | None, *, dense: bool) -> Counter[str]:
    """Summed ns by the weight's short name."""
    layers = weights_by_layer(plan)
    if layer is not None and layer not in layers:
        given, known = f"layer {layer} of {plan.measured.model}", f"one from 0 to {max(layers)}"
        raise PlanError(given, known, "Name one of these.")
    found: Counter[str] = Counter()
    for weights in layers.values() if layer is None else [layers[layer]]:
        for name, choice in weights.items():
            found[name] += _latency(choice, timing, dense=dense)
    return found


def _latency(choice: WeightChoice, timing: Timing, *, dense: bool) -> int:
    form = form_named("dense" if dense else choice.form)
    dim = form.full(choice.weight) if dense else choice.dim
    ns, _ = timing.of_weight(form, choice.weight, np.array([dim], dtype=np.int64))
    if int(ns[0, 0]) == UNKNOWN:
        operation = form.operation(choice.weight, dim, timing.workloads[0].rows)
        shape = " ".join(f"{axis}={size}" for axis, size in operation.shape)
        assert timing.profile is not None
        raise ProfileError(
            f"profile {timing.profile.path.stem} lacks {operation.operator} {shape}, which {choice.name} runs",
            "measured latencies of every weight",
            "Profile this model's shapes with gac profile --model, or choose another workload.",
        )
    return int(ns[0, 0])


def _draw(ax: "Axes", names: list[str], bars: list[Counter[str]]) -> None:
    from matplotlib import colormaps

    kinds = list(dict.fromkeys(kind for bar in bars for kind in bar))
    scale, unit = time_unit(max(bar.total() for bar in bars))
    colours = colormaps[MAP](np.linspace(0.25, 1, max(2, len(kinds))))
    rows, left = np.arange(len(bars)), np.zeros(len(bars))
    for at, kind in enumerate(kinds):
        widths = np.array([bar[kind] / scale for bar in bars])
        style = {"color": colours[at], "hatch": HATCHES[at % len(HATCHES)], "ec": "black", "lw": 0.4}
        ax.barh(rows, widths, 0.66, left=left, label=kind.removesuffix("_proj"), **style)
        left += widths
    for row, end in enumerate(left.tolist()):
        over = "" if row == 0 else f" ({end / left[0]:.2f}x)"
        ax.text(end, row, f" {end:,.{0 if end >= 100 else 1}f}{over}", va="center", fontsize=7)
    ax.set_yticks(rows, names, parse_math=False)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * float(left.max()))
    ax.set_xlabel(f"predicted latency of the targeted weights ({unit})")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.7 / len(bars) - 0.12), ncols=len(kinds), fontsize=7)
