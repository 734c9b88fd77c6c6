"""Speeds of models in an engine, over the first of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gac.core.arguments import checked
from gac.core.errors import GacError
from gac.evaluation.engines.records import EngineBench, EngineTiming, rate
from gac.reporting.page import COLOURS, DOTTED, HATCHES, Axes, entry, legend_below, panel, proxy

_BAR = 0.8  # of a row: all bars of a workload
_GRAPH: Any = {"marker": "D", "mec": "black", "mfc": "white", "mew": 0.8, "ms": 4.0, "ls": "none"}


@checked
def speeds(bench: EngineBench | str | Path, *, title: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """One bar a model and workload: its speed over the first model, with the range of all turns, and its time.

    A diamond is the speed of the CUDA graph of a decode step alone.

    Args:
        bench: a result of ``gac bench --engine vllm`` with two models or more, or the path of one.

    Raises:
        GacError: there is one model alone, or the file is none.
    """
    bench = EngineBench.opened(bench)
    if len(bench.models) < 2:
        remedy = "Time it with the model that it is compared with: gac bench DIR --against MODEL."
        raise GacError("a bench of one model", "two or more", remedy)
    rows = len(bench.by_workload)
    with panel(ax, (6.4, 1.1 + rows * (0.16 + 0.2 * len(bench.models)))) as ax:
        for row, timings in enumerate(bench.by_workload):
            _draw(ax, row, timings)
        ax.set_yticks(np.arange(rows), [timings[0].workload for timings in bench.by_workload])
        ax.invert_yaxis()
        ax.axvline(1, **DOTTED)
        ends = [end for timings in bench.by_workload for each in timings for end in _ends(each)]
        ax.set(xlim=(0, 1.05 * max(ends)), xlabel=f"speed over {bench.labels[0]}; lines show the range of all turns")
        engine = f"vLLM {bench.versions.get(bench.engine, '')}".rstrip()
        ax.set_title(f"{engine}, {bench.device}" if title is None else title, pad=4)
        _legend(ax, bench)
    return ax


def _ends(timing: EngineTiming) -> list[float]:
    """Return the speed over the first model, those of all turns, and that of the CUDA graph."""
    return [timing.ratio or 1.0, *timing.ratio_samples, *([timing.graph_ratio] if timing.graph_ratio else [])]


def _draw(ax: "Axes", row: int, timings: Sequence[EngineTiming]) -> None:
    height = _BAR / len(timings)
    for number, timing in enumerate(timings):
        place = row + (number - (len(timings) - 1) / 2) * height
        ax.barh(place, timing.ratio or 1.0, 0.92 * height, zorder=2, **_style(number))
        if timing.ratio_samples:
            ends = [min(timing.ratio_samples), max(timing.ratio_samples)]
            ax.plot(ends, [place, place], color="black", lw=1.2, zorder=3)
        if timing.graph_ratio is not None:
            ax.plot([timing.graph_ratio], [place], zorder=4, **_GRAPH)
        # One column beside the axes: a label at the end of a bar would lie on the range.
        ax.text(1.01, place, _words(timing), va="center", fontsize=6.5, transform=ax.get_yaxis_transform())


def _style(number: int) -> dict[str, Any]:
    return {"facecolor": COLOURS[number], "alpha": 0.75, "hatch": HATCHES[number], "ec": "black", "lw": 0.4}


def _words(timing: EngineTiming) -> str:
    time = f"{timing.ms / 1e3:,.2f} s" if timing.ms >= 1e4 else f"{timing.ms:,.{0 if timing.ms >= 100 else 2}f} ms"
    ratio = "" if timing.ratio is None else f"{timing.ratio:.2f}x, "
    return f"{ratio}{time}, {rate(timing.tokens_per_second)} tokens/s"


def _legend(ax: "Axes", bench: EngineBench) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(label=entry(label), **_style(number)) for number, label in enumerate(bench.labels)]
    if any(each.graph_ratio for timings in bench.by_workload for each in timings):
        handles.append(proxy("CUDA graph of a step alone", **_GRAPH))
    legend_below(ax, handles=handles, ncols=4)
