"""Cliffs and their causes as tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gac.core.display import Table
from gac.profiling.cliffs import CLASSES
from gac.profiling.table import Sweep
from gac_extensions.lab.cliffs import Cliffs
from gac_extensions.lab.kernel_names import describe

_KERNEL_WIDTH = 40
_CLIFFS = """\
collapsed: dims slower than some larger dim; worst: such a dim -> the larger one, times faster
period: only its multiples keep up (1: alignment does not matter); steps: jumps among the other dims"""
_ALIGNMENT = """\
of the dims that 1 (odd), 2, 4, ... is the largest power of two to divide: median latency over that
of the larger, coarser dim that padding would make of them
-: fewer than three such dims; *: over 1.10x, the class does not keep up"""
_POINTS = """\
us: median; +-: half the spread of samples and passes; slower than: the larger dim that rescues it
cause: what the recorded kernels tell (?: they do not)"""


@dataclass(frozen=True, eq=False)
class ExplainedSweep:
    """One sweep, its cliffs, and the cause of each collapsed dim and of each edge (only its ``kind`` is shown)."""

    sweep: Sweep
    cliffs: Cliffs
    causes: tuple[Any, ...]  # None where the record does not tell it
    edges: tuple[Any, ...]


def cliffs_table(gpu: str, sweeps: Sequence[ExplainedSweep]) -> Table:
    """One row a sweep: number of collapsed dims, the worst of them and its rescue; then the causes of all."""
    columns = [("sweep", "<"), *((name, ">") for name in ("dims", "collapsed", "worst", "period", "steps"))]
    rows = []
    for explained in sweeps:
        cliffs, worst = explained.cliffs, "none"
        if collapsed := len(cliffs.collapsed):
            i = int(cliffs.slowdown.argmax())
            worst = f"{cliffs.collapsed[i]} -> {cliffs.rescue[i]}, {cliffs.slowdown[i]:.2f}x"
        counts = f"{collapsed:,}", worst, str(cliffs.period), f"{len(cliffs.sweet_spots):,}"
        rows.append((explained.sweep.label, f"{len(explained.sweep):,}", *counts))
    return Table(columns, rows, gpu, f"{_CLIFFS}\n{_causes(sweeps)}")


def _causes(sweeps: Sequence[ExplainedSweep]) -> str:
    causes = [cause for explained in sweeps for cause in explained.causes]
    if not causes:
        return "no dim is collapsed"
    kinds = Counter("the record does not tell" if cause is None else cause.kind for cause in causes)
    shares = ", ".join(f"{kind} {count / len(causes):.1%}" for kind, count in kinds.most_common())
    return f"causes of the {len(causes):,} collapsed dims: {shares}"


def alignment_table(sweeps: Sequence[ExplainedSweep]) -> Table:
    """The evidence for each sweep's period: the slowdown of every alignment class."""
    columns = [("sweep", "<"), ("period", ">"), *(("odd" if step == 1 else str(step), ">") for step in CLASSES)]
    rows = []
    for explained in sweeps:
        classes = explained.cliffs.classes
        ratios = {each.step: f"{each.slowdown:.2f}{' ' if each.keeps_up else '*'}" for each in classes}
        period = str(explained.cliffs.period)
        rows.append((explained.sweep.label, period, *(ratios.get(step, "- ") for step in CLASSES)))
    return Table(columns, rows, notes=_ALIGNMENT)


def points_table(explained: ExplainedSweep, first: int, last: int) -> Table:
    """Every measured dim from ``first`` to ``last``: its latency, and its rescue where it is collapsed."""
    sweep, cliffs = explained.sweep, explained.cliffs
    columns = [*((name, ">") for name in (sweep.axis, "us", "+-", "slower", "than")), ("cause", "<"), ("kernels", "<")]
    slow = zip(cliffs.collapsed.tolist(), cliffs.slowdown, cliffs.rescue, explained.causes, strict=True)
    collapsed = {
        dim: (f"{times:.2f}x", str(rescue), cause.kind if cause else "?") for dim, times, rescue, cause in slow
    }
    rows = []
    points = zip(sweep.dims.tolist(), sweep.ns.tolist(), sweep.iqr.tolist(), sweep.kernels, strict=True)
    for dim, ns, iqr, kernels in points:
        if first <= dim <= last:
            names = "\n".join(dict.fromkeys(map(_short, kernels)))
            rows.append((str(dim), f"{ns / 1e3:.1f}", f"{iqr / 2e3:.1f}", *collapsed.get(dim, ("", "", "")), names))
    return Table(columns, rows, sweep.label, _POINTS)


def _short(kernel: str) -> str:
    name = describe(kernel).label
    return name if len(name) <= _KERNEL_WIDTH else f"{name[: _KERNEL_WIDTH - 17]}...{name[-14:]}"
