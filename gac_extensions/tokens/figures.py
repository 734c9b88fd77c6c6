"""Figures of plans of tokens: the tokens that each layer keeps, and their loss."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gac.core.arguments import checked
from gac.reporting.page import (
    DOTTED,
    Axes,
    Figure,
    Line2D,
    check_many,
    legend_below,
    log_scale,
    marker,
    page,
    panel,
    proxy,
)
from gac_extensions.tokens.plan import TokenPlan, check_comparable

_SPREAD = 0.5  # of a layer's width: the markers of several plans stand side by side in it
Plans = Mapping[str, TokenPlan | str | Path]


@checked
def tokens(plans: Plans, *, ax: "Axes | None" = None, legend: bool = True) -> "Axes":
    """Draw the tokens of a context that each plan keeps in every layer; the dotted line is the full context.

    Args:
        plans: by the name to show, all for one model and contexts of one length; at most 6.

    Raises:
        PlanError: the plans are for different models or contexts.
        GacError: matplotlib is missing, or there are no plans or more than 6.
    """
    opened = _opened(plans)
    context = next(iter(opened.values())).context
    with panel(ax, (5.6, 3.0)) as ax:
        _draw(ax, opened, [[layer.kept for layer in plan.layers] for plan in opened.values()], "tokens kept", legend)
        ax.axhline(context, **DOTTED)
        ax.set_ylim(0, 1.06 * context)
        ax.set_ylabel(f"tokens kept of {context:,}")
    return ax


@checked
def token_losses(plans: Plans, *, ax: "Axes | None" = None, legend: bool = True) -> "Axes":
    """Draw the measured loss of each layer's budget, nats a token, without layers that keep all; as ``tokens``."""
    opened = _opened(plans)
    with panel(ax, (5.6, 3.0)) as ax:
        losses = [[layer.loss or None for layer in plan.layers] for plan in opened.values()]
        _draw(ax, opened, losses, "loss of the evicted tokens, without layers that keep all", legend)
        if any(loss and loss > 0 for row in losses for loss in row):
            log_scale(ax)
        ax.set_ylabel("loss (nats a token)")
    return ax


@checked
def figure_of_tokens(plans: Plans, title: str | None = None) -> "Figure":
    """Draw ``tokens`` and ``token_losses`` on one page with one legend."""
    opened = _opened(plans)
    model = next(iter(opened.values())).model
    presses = ", ".join(dict.fromkeys(plan.press for plan in opened.values()))
    with page(2, f"{model}, {presses}" if title is None else title) as (figure, (kept, lost)):
        tokens(opened, ax=kept, legend=False)
        token_losses(opened, ax=lost, legend=False)
        figure.legend(handles=_legend(opened), loc="outside lower center", ncols=3, fontsize=7)
    return figure


def _opened(plans: Plans) -> dict[str, TokenPlan]:
    check_many(len(plans), "plans")
    opened = TokenPlan.opened_each(plans)
    check_comparable(opened)
    return opened


def _draw(
    ax: "Axes", plans: Mapping[str, TokenPlan], heights: Sequence[Sequence[float | None]], title: str, legend: bool
) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, (plan, row) in enumerate(zip(plans.values(), heights, strict=True)):
        shift = 0.0 if len(plans) == 1 else _SPREAD * (number / (len(plans) - 1) - 0.5)
        points = [(layer.layer + shift, y) for layer, y in zip(plan.layers, row, strict=True) if y is not None]
        ax.plot(*zip(*points, strict=True) if points else ([], []), **marker(number), zorder=3)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.set_xlabel("decoder layer")
    ax.set_title(title, pad=4)
    if legend:
        legend_below(ax, handles=_legend(plans), ncols=3, fontsize=6)


def _legend(plans: Mapping[str, TokenPlan]) -> list["Line2D"]:
    return [proxy(name, **marker(number)) for number, name in enumerate(plans)]
