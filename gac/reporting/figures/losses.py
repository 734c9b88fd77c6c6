"""Losses: predicted against measured, and those of a healing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gac.core.arguments import checked
from gac.core.errors import GacError
from gac.healing.records import LossPoint
from gac.reporting.page import COLOURS, Axes, Figure, page, panel

_BAND = 1.25
_LARGEST = 1000
_DASHED: Any = {"marker": "o", "ls": "--", "color": COLOURS[1], "mfc": "none", "ms": 3.5, "lw": 0.8}
_SOLID: Any = {"marker": "s", "ls": "-", "color": COLOURS[0], "ms": 3.5, "lw": 0.8}


@dataclass(frozen=True)
class Outcome:
    """Predicted and measured loss of a plan: ``ln(perplexity / dense)``, nats a token."""

    name: str
    predicted: float
    measured: float


@checked
def prediction(outcomes: Sequence[Outcome], *, title: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """One point a compressed model, beside the line on which predictions come true and a band of 1.25x around it."""
    if not outcomes:
        remedy = "Measure a compressed model: gac eval DIR --against MODEL."
        raise GacError("no outcomes to draw", "one or more", remedy)
    for outcome in outcomes:
        if not (abs(outcome.predicted) <= _LARGEST and abs(outcome.measured) <= _LARGEST):
            problem = f"{outcome.name}: predicted {outcome.predicted}, measured {outcome.measured}"
            raise GacError(problem, f"finite losses, of at most {_LARGEST:,} nats", "Leave it out.")
    predicted, measured = ([getattr(outcome, name) for outcome in outcomes] for name in ("predicted", "measured"))
    top = 1.15 * max(*predicted, *measured, 0.01)
    low, high = [0, top / _BAND], [0, top * _BAND]
    with panel(ax, (3.9, 3.6)) as ax:
        ax.plot([0, top], [0, top], color="black", lw=0.8, label="as predicted", zorder=2)
        ax.fill_between([0, top], low, high, color="#DDDDDD", lw=0, label=f"within {_BAND:g}x", zorder=1)
        ax.plot(predicted, measured, "o", color=COLOURS[0], ms=4.5, zorder=3)
        for outcome in outcomes:  # the name to the left of those near the right edge
            right = outcome.predicted > 0.5 * top
            place: dict[str, Any] = {"textcoords": "offset points", "ha": "right" if right else "left", "va": "top"}
            point = outcome.predicted, outcome.measured
            ax.annotate(outcome.name, point, (-6 if right else 6, -3), fontsize=6.5, **place)
        ratio = "ln(perplexity / dense), nats a token"
        ax.set(xlim=(min(0.0, *predicted), top), xlabel=f"predicted {ratio}")
        ax.set(ylim=(min(0.0, *measured), top), ylabel=f"measured {ratio}")
        ax.set_title("predicted and measured" if title is None else title, pad=4)
        ax.legend(loc="upper left")
    return ax


def figure_of_healing(curve: Sequence[LossPoint], start: float, title: str, loss: str) -> "Figure":
    """A panel for the layers by themselves and one for the whole model, those of them that there are.

    Args:
        start: the held-out loss before anything was trained, nats a token.
        loss: the name of the whole model's loss.
    """
    by_layer, of_model = ([point for point in curve if point.phase == phase] for phase in ("blocks", "model"))
    with page(max(1, bool(by_layer) + bool(of_model)), title) as (figure, axes):
        panels = iter(axes)
        if by_layer:
            ax = next(panels)
            _two_curves(ax, [point.step for point in by_layer], by_layer, ("before", "after"))
            ax.set(xlabel="decoder layer", ylabel="relative squared error of its output")
            ax.set_title("layers by themselves, on text held out")
        if of_model:
            ax = next(panels)
            ax.axhline(start, color="black", lw=0.8, ls=":", label="held out, before")
            _two_curves(ax, [point.tokens / 1e6 for point in of_model], of_model, ("trained on", "held out"))
            ax.set(xlabel="tokens read, millions", ylabel=f"{loss}, nats a token")
            ax.locator_params(axis="x", nbins=5)
            ax.set_title("whole model")
    return figure


def _two_curves(ax: "Axes", x: Sequence[float], points: Sequence[LossPoint], labels: tuple[str, str]) -> None:
    ax.plot(x, [point.train_loss for point in points], label=labels[0], **_DASHED)
    ax.plot(x, [point.heldout_loss for point in points], label=labels[1], **_SOLID)
    ax.set_ylim(bottom=0)
    ax.legend()
