"""The loss curves of a healing."""

from collections.abc import Callable, Sequence
from functools import partial
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
        start: the loss on what is held out before anything was trained, nats a token.
        loss: what that of the whole model is called.

    Raises:
        GacError: matplotlib is missing.
    """
    by_layer, of_model = ([point for point in curve if point.phase == phase] for phase in ("blocks", "model"))
    panels: list[Callable[[Axes], None]] = []
    if by_layer:
        panels.append(partial(_layers, points=by_layer))
    if of_model:
        panels.append(partial(_of_model, points=of_model, start=start, loss=loss))
    with page(max(1, len(panels)), title) as (figure, axes):
        for draw, ax in zip(panels, axes, strict=False):
            draw(ax)
    return figure


def _layers(ax: "Axes", points: Sequence[LossPoint]) -> None:
    _two_curves(ax, [point.step for point in points], points, ("before", "after"))
    ax.set_xlabel("decoder layer")
    ax.set_ylabel("relative squared error of its output")
    ax.set_title("layers by themselves, on text held out")


def _of_model(ax: "Axes", points: Sequence[LossPoint], start: float, loss: str) -> None:
    ax.axhline(start, color="black", lw=0.8, ls=":", label="held out, before")
    _two_curves(ax, [point.tokens / 1e6 for point in points], points, ("trained on", "held out"))
    ax.set_xlabel("tokens read, millions")
    ax.set_ylabel(f"{loss}, nats a token")
    ax.locator_params(axis="x", nbins=5)
    ax.set_title("whole model")


def _two_curves(ax: "Axes", x: Sequence[float], points: Sequence[LossPoint], labels: tuple[str, str]) -> None:
    ax.plot(x, [point.train_loss for point in points], label=labels[0], **_DASHED)
    ax.plot(x, [point.heldout_loss for point in points], label=labels[1], **_SOLID)
    ax.set_ylim(bottom=0)
    ax.legend()
