"""The loss curves of a healing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gac.healing.records import LossPoint
from gac.reporting.page import COLOURS, page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHED: Any = {"marker": "o", "ls": "--", "color": COLOURS[1], "mfc": "none", "ms": 3.5, "lw": 0.8}
_SOLID: Any = {"marker": "s", "ls": "-", "color": COLOURS[0], "ms": 3.5, "lw": 0.8}


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
