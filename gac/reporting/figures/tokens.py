"""Plans of tokens kept, layer by layer: how many tokens each layer keeps, and what that loses."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gac.core.arguments import checked
from gac.core.errors import PlanError
from gac.plan.token_plan import TokenPlan
from gac.reporting.page import DOTTED, check_many, log_scale, marker, page, panel, proxy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_APART = 0.5  # of a layer's width: what the plans' markers are spread over
Plans = Mapping[str, TokenPlan | str | Path]


@checked
def tokens(plans: Plans, *, ax: "Axes | None" = None, legend: bool = True) -> "Axes":
    """How many of a context's tokens each plan keeps in every layer; layers that keep all stand on the dotted line.

    Args:
        plans: by the name to show, all for one model and contexts of one length; at most 6.

    Raises:
        PlanError: the plans are for different models or contexts.
        GacError: matplotlib is missing, or there are no plans or more than 6.
    """
    opened = _opened(plans)
    context = next(iter(opened.values())).context
    with panel(ax, (5.6, 3.0)) as ax:
        for number, plan in enumerate(opened.values()):
            _draw(ax, plan, number, len(opened), [one.kept for one in plan.layers])
        ax.axhline(context, **DOTTED)
        ax.set_ylim(0, 1.06 * context)
        ax.set_ylabel(f"tokens kept of {context:,}")
        _finish(ax, list(opened), "tokens kept", legend)
    return ax


@checked
def token_losses(plans: Plans, *, ax: "Axes | None" = None, legend: bool = True) -> "Axes":
    """What each layer's budget was measured to lose under each plan, nats a token; layers that keep all lose nothing.

    Raises:
        PlanError, GacError: as for ``tokens``.
    """
    opened = _opened(plans)
    with panel(ax, (5.6, 3.0)) as ax:
        for number, plan in enumerate(opened.values()):
            _draw(ax, plan, number, len(opened), [one.loss or None for one in plan.layers])
        if any(one.loss > 0 for plan in opened.values() for one in plan.layers):
            log_scale(ax)
        ax.set_ylabel("loss (nats a token)")
        _finish(ax, list(opened), "what that loses; layers that keep all are left out", legend)
    return ax


@checked
def figure_of_tokens(plans: Plans, title: str | None = None) -> "Figure":
    """``tokens`` and ``token_losses`` on one page with one legend.

    Raises:
        PlanError, GacError: as for ``tokens``.
    """
    opened = _opened(plans)
    first = next(iter(opened.values()))
    presses = ", ".join(dict.fromkeys(plan.press for plan in opened.values()))
    with page(2, f"{first.model}, {presses}" if title is None else title) as (figure, (kept, lost)):
        tokens(opened, ax=kept, legend=False)
        token_losses(opened, ax=lost, legend=False)
        box = figure.legend(handles=_legend(list(opened)), loc="outside lower center", ncols=3, fontsize=7)
        for text in box.get_texts():
            text.set_parse_math(False)
    return figure


def check_alike(plans: Mapping[str, TokenPlan]) -> None:
    """Refuse plans that cannot be set beside each other.

    Raises:
        PlanError: they are for different models, or contexts of different lengths.
    """
    (name, first), *others = plans.items()
    for other, plan in others:
        if plan.digest != first.digest:
            given = f"plan {name} for {first.model} beside {other} for {plan.model}, other weights"
            raise PlanError(given, "plans for the same model", "Compare plans that were made for the same weights.")
        if plan.context != first.context:
            given = f"plan {name} of contexts of {first.context:,} tokens beside {other} of {plan.context:,}"
            raise PlanError(given, "plans for contexts of one length", "Compare plans that were priced alike.")


def _opened(plans: Plans) -> dict[str, TokenPlan]:
    check_many(len(plans), "plans")
    opened = TokenPlan.opened_each(plans)
    check_alike(opened)
    return opened


def _draw(ax: "Axes", plan: TokenPlan, number: int, of: int, heights: list[int] | list[float | None]) -> None:
    shift = 0.0 if of == 1 else _APART * (number / (of - 1) - 0.5)
    shown = [
        (one.layer + shift, height) for one, height in zip(plan.layers, heights, strict=True) if height is not None
    ]
    ax.plot(*zip(*shown, strict=True) if shown else ([], []), **marker(number), zorder=3)


def _finish(ax: "Axes", names: list[str], title: str, legend: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.set_xlabel("decoder layer")
    ax.set_title(title, pad=4)
    if legend:
        ax.legend(handles=_legend(names), loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=6)


def _legend(names: list[str]) -> list["Line2D"]:
    return [proxy(name, **marker(number)) for number, name in enumerate(names)]
