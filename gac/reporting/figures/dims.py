"""Plans layer by layer: the dims of several, the heads of one, and the latency of each weight."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gac.allocation.latencies import BF16, UNKNOWN, Timing
from gac.core.arguments import checked
from gac.core.errors import PlanError, ProfileError
from gac.core.workloads import Workload
from gac.forms import DENSE, form_named
from gac.plan.layers import kinds_of, weights_by_layer
from gac.plan.plan import Plan, WeightChoice
from gac.profiling.records import Point
from gac.profiling.table import Profile
from gac.reporting.page import (
    ALIGNED,
    DOTTED,
    HATCHES,
    MAP,
    Axes,
    Figure,
    Line2D,
    check_many,
    legend_below,
    marker,
    page,
    panel,
    proxy,
    time_unit,
)
from gac.schemes import scheme_named

_APART = 0.5  # of a layer's width: what the plans' markers are spread over


@checked
def dims(
    plans: Mapping[str, Plan | str | Path],
    weight: str,
    *,
    form: str | None = None,
    ax: "Axes | None" = None,
    legend: bool = True,
) -> "Axes":
    """The dim that each plan gives one projection in one form, layer by layer.

    Weights that stay dense stand on the top line, those of another form on the line below it: a rank and a width have
    no axis in common. A skipped block has 0.

    Args:
        plans: by the name to show, all for one model; at most 6.
        weight: short name of the projection, ``down_proj``.
        form: ``low_rank``, ``narrow``, ...; None takes the one that most of these weights have.

    Raises:
        PlanError: the plans are for different models, their layers have no such weight, or it never has that form.
    """
    plans = Plan.opened_each(plans)
    check_plans(plans)
    chosen = [_choices(plan, weight) for plan in plans.values()]
    forms = _forms(chosen)
    if form is not None and form not in forms:
        raise PlanError(f"form {form!r} of {weight}", f"one of {', '.join(forms) or 'none'}", "Name one of these.")
    form = form or next(iter(forms), None)
    others = [name for name in forms if name != form]
    compressed = [each.dim for by_layer in chosen for each in by_layer.values() if _kind(each) == form]
    lines = {"dense": 1.1 * max(compressed, default=8)}
    if others:
        lines = {others[0] if len(others) == 1 else "other form": lines["dense"], "dense": 1.09 * lines["dense"]}
    with panel(ax, (5.6, 3.0)) as ax:
        for number, by_layer in enumerate(chosen):
            _draw(ax, by_layer, number, len(chosen), form, list(lines.values()))
        _label(ax, lines)
        ax.set_title(f"{weight}, {form}" if others else weight, pad=4)
        ax.set_ylabel("dim" if form is None else form_named(form).meaning.partition(" /")[0])
        if legend:
            legend_below(ax, handles=_legend(plans), ncols=3, fontsize=6)
    return ax


@checked
def figure_of_dims(
    plans: Mapping[str, Plan | str | Path], weights: str | Sequence[str] = (), title: str | None = None
) -> "Figure":
    """``dims`` for each form of several projections, by default all, on a page with one legend; errors as there."""
    plans = Plan.opened_each(plans)
    first = check_plans(plans)
    names = ([weights] if isinstance(weights, str) else list(weights)) or kinds_of(weights_by_layer(first))
    panels: list[tuple[str, str | None]] = []
    for name in names:
        forms = _forms([_choices(plan, name) for plan in plans.values()])
        panels += [(name, form) for form in forms or (None,)]
    with page(len(panels), first.measured.model if title is None else title) as (figure, axes):
        for ax, (name, form) in zip(axes, panels, strict=True):
            dims(plans, name, form=form, ax=ax, legend=False)
        figure.legend(handles=_legend(plans), loc="outside lower center", ncols=3, fontsize=7)
    return figure


def check_plans(plans: Mapping[str, Plan]) -> Plan:
    """Return the first of the plans, which have to be 1 to 6 for one model."""
    check_many(len(plans), "plans")
    first, *others = plans.values()
    for other in others:
        first.compare(other)
    return first


def _choices(plan: Plan, weight: str) -> dict[int, WeightChoice]:
    layers = weights_by_layer(plan)
    choices = {layer: by_name[weight] for layer, by_name in layers.items() if weight in by_name}
    if not choices:
        known = ", ".join(kinds_of(layers))
        raise PlanError(f"weight {weight!r} of {plan.measured.model}", f"one of {known}", "Name one of these.")
    return choices


def _kind(choice: WeightChoice) -> str:
    return form_named(choice.form).kind


def _forms(chosen: Iterable[Mapping[int, WeightChoice]]) -> list[str]:
    """The forms whose dims have an axis, the most frequent first."""
    choices = (choice for by_layer in chosen for choice in by_layer.values())
    counts = Counter(_kind(choice) for choice in choices if choice.dim and not choice.is_dense)
    return [form for form, _ in counts.most_common()]


def _draw(
    ax: "Axes", chosen: Mapping[int, WeightChoice], number: int, plans: int, form: str | None, lines: Sequence[float]
) -> None:
    shift = 0.0 if plans == 1 else _APART * (number / (plans - 1) - 0.5)
    for layer, choice in chosen.items():
        here = _kind(choice) == form or not choice.dim
        height = choice.dim if here else lines[-1 if choice.is_dense else 0]
        style = marker(number, hollow=not choice.aligned, size=4.0 if here else 2.6)
        ax.plot([layer + shift], [height], **style, zorder=3, clip_on=False)  # a skipped block has 0
        if here and form_named(choice.form).shortening(choice.dim)[0].shortens(choice.weight):
            ax.plot([layer + shift], [height], "_", color="black", ms=5.5, mew=0.8, zorder=4)


def _label(ax: "Axes", lines: Mapping[str, float]) -> None:
    from matplotlib.ticker import MaxNLocator

    for height in lines.values():
        ax.axhline(height, **DOTTED)
    lowest, top = min(lines.values()), max(lines.values())
    numbers = [tick for tick in MaxNLocator(5, integer=True).tick_values(0, lowest) if 0 <= tick < 0.92 * lowest]
    ax.set_yticks([*numbers, *lines.values()], [*(f"{number:,.0f}" for number in numbers), *lines])
    ax.set_ylim(0, 1.06 * top)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.set_xlabel("decoder layer")


def _legend(names: Iterable[str]) -> list["Line2D"]:
    hollow = proxy("hollow: no multiple of 8", marker="o", mec="#555555", mfc="none", ls="none", ms=4.0)
    barred = proxy("bar across: shortened together with other weights", marker="_", color="black", ls="none", ms=7)
    return [*(proxy(name, **marker(number)) for number, name in enumerate(names)), hollow, barred]


@checked
def heads(plan: Plan | str | Path, *, ax: "Axes | None" = None) -> "Axes":
    """Numbers that the KV cache keeps of a token for each key-value head, hollow where they are no multiple of 8.

    Heads are counted layer by layer; keys and values differ by their markers.

    Raises:
        PlanError: no weight of the plan has key-value heads of its own.
    """
    plan = Plan.opened(plan)
    cached: dict[str, list[WeightChoice]] = {}
    for weights in weights_by_layer(plan).values():
        for name, choice in weights.items():
            if choice.weight.cached and choice.weight.heads > 0:
                cached.setdefault(name, []).append(choice)
    if not cached:
        problem = f"plan for {plan.measured.model}, whose weights are not of single key-value heads"
        raise PlanError(problem, "k_proj and v_proj as weights of their own", "Draw it as a heat map: gac plot plan.")
    every = [choice.weight for choices in cached.values() for choice in choices]
    full = max(weight.cached_numbers / weight.heads for weight in every)
    with panel(ax, (5.6, 2.8)) as ax:
        for number, choices in enumerate(cached.values()):
            heads = [choice.weight.heads for choice in choices]
            numbers = [form_named(choice.form).cache.numbers(choice.weight, choice.dim) for choice in choices]
            kept = np.repeat(np.array(numbers) / heads, heads)
            places = np.arange(len(kept))
            for hollow in (False, True):
                shown = (kept % ALIGNED != 0) == hollow
                ax.plot(places[shown], kept[shown], **marker(number, hollow=hollow, size=3.2), zorder=3)
        ax.axhline(full, **DOTTED)
        entries = _legend(cached)[:-1]
        legend_below(ax, handles=entries, ncols=len(entries), fontsize=6)
        ax.set(ylim=(0, 1.08 * full), ylabel="dims a head (numbers cached a token)")
        ax.set_xlabel(f"key-value head, layer by layer ({every[0].heads} a layer)")
        ax.set_title(f"{plan.measured.model}, {plan.recipe.measure.method}; dotted: the dense head", pad=4)
    return ax


@checked
def layer_time(
    plans: Mapping[str, Plan | str | Path],
    profile: Profile | str | Path,
    workload: str | None = None,
    *,
    layer: int | None = None,
    title: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Measured or interpolated latency of each targeted weight: a bar of the dense model, and one for each plan.

    Args:
        plans: by the name to show, all for one model; at most 6.
        workload: ``prefill:1x1024`` and the like; None takes the first that the first plan was made for.
        layer: one decoder layer; None sums over all.

    Raises:
        PlanError: the plans are for different models or run fused, or there is no such layer.
        ProfileError: the profile lacks a shape.
    """
    plans = Plan.opened_each(plans)
    first = check_plans(plans)
    profile = Profile.opened(profile)
    if workload is None and not first.workloads:
        problem = f"plan for {first.measured.model} names no workload"
        raise PlanError(problem, "one, to look latencies up for", "Name one.")
    workload = first.workloads[0].workload if workload is None else workload
    timing = Timing(profile, (Workload.parse(workload),))
    bars = {"dense": _latencies(first, timing, layer, dense=True)}
    for name, plan in plans.items():
        if plan.recipe.deployment.fuse is True or any(site.shared for site in plan.sites):
            problem = f"plan {name}, whose weights share their first GEMMs"
            raise PlanError(problem, "a plan in which each weight runs by itself", "Plan with fuse=False.")
        if plan.gpus > 1:
            problem = f"plan {name}, whose weights are split over {plan.gpus} GPUs"
            raise PlanError(problem, "a plan for one GPU", "Its summary has its latencies.")
        bars[name] = _latencies(plan, timing, layer, dense=False)
    with panel(ax, (6.2, 1.4 + 0.36 * len(bars))) as ax:
        _draw_bars(ax, bars)
        where = "all layers" if layer is None else f"layer {layer}"
        words = f"{first.measured.model}, {where}, {timing.workloads[0]}, {profile.header.gpu}"
        ax.set_title(words if title is None else title, pad=4)
    return ax


def _latencies(plan: Plan, timing: Timing, layer: int | None, *, dense: bool) -> Counter[str]:
    layers = weights_by_layer(plan)
    if layer is not None and layer not in layers:
        problem, known = f"layer {layer} of {plan.measured.model}", f"one from 0 to {max(layers)}"
        raise PlanError(problem, known, "Name one of these.")
    latencies: Counter[str] = Counter()
    for weights in layers.values() if layer is None else [layers[layer]]:
        latencies.update({name: _latency(choice, timing, dense=dense) for name, choice in weights.items()})
    return latencies


def _latency(choice: WeightChoice, timing: Timing, *, dense: bool) -> int:
    form, scheme = (DENSE, BF16) if dense else (form_named(choice.form), scheme_named(choice.scheme))
    dim = form.full(choice.weight) if dense else choice.dim
    ns, _ = timing.of_weight(form, choice.weight, np.array([dim], dtype=np.int64), scheme)
    if int(ns[0, 0]) == UNKNOWN:
        shape = Point(form.latency.operation(choice.weight, dim, timing.workloads[0].rows), scheme.dtype)
        assert timing.profile is not None
        raise ProfileError(
            f"profile {timing.profile.path.stem} lacks {shape}, which {choice.name} runs",
            "measured latencies of every weight",
            "Profile this model's shapes with gac profile --model, or choose another workload.",
        )
    return int(ns[0, 0])


def _draw_bars(ax: "Axes", bars: Mapping[str, Counter[str]]) -> None:
    from matplotlib import colormaps

    kinds = list(dict.fromkeys(kind for bar in bars.values() for kind in bar))
    scale, unit = time_unit(max(bar.total() for bar in bars.values()))
    colours = colormaps[MAP](np.linspace(0.25, 1, max(2, len(kinds))))
    rows, left = np.arange(len(bars)), np.zeros(len(bars))
    for number, kind in enumerate(kinds):
        widths = np.array([bar[kind] / scale for bar in bars.values()])
        style = {"color": colours[number], "hatch": HATCHES[number % len(HATCHES)], "ec": "black", "lw": 0.4}
        ax.barh(rows, widths, 0.66, left=left, label=kind.removesuffix("_proj"), **style)
        left += widths
    for row, end in enumerate(left.tolist()):
        over = "" if row == 0 else f" ({end / left[0]:.2f}x)"
        ax.text(end, row, f" {end:,.{0 if end >= 100 else 1}f}{over}", va="center", fontsize=7)
    ax.set_yticks(rows, list(bars), parse_math=False)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.18 * float(left.max())), xlabel=f"predicted latency of the targeted weights ({unit})")
    legend_below(ax, ncols=len(kinds), fontsize=7)
