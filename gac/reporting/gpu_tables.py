"""Profiles, cliffs and their causes as rich tables, at most 100 columns wide; nothing is printed here."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gac.profiling.cliffs import CLASSES, Cliffs
from gac.profiling.kernel_names import describe
from gac.profiling.table import Sweep
from gac.reporting.formatting import legend, new_table

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


class Cause(Protocol):
    """Why a dim is slow; only the kind is shown."""

    @property
    def kind(self) -> str: ...


@dataclass(frozen=True, eq=False)
class ExplainedSweep:
    """One sweep, its cliffs, and the cause of each collapsed dim and of each edge where the record tells it."""

    sweep: Sweep
    cliffs: Cliffs
    causes: tuple[Cause | None, ...]
    edges: tuple[Cause | None, ...]


def profiles_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """The profiles that there are: ``name``, ``where``, and either what is in it or its ``problem``."""
    right = ["shapes", "operators"]
    table = new_table((name, ">" if name in right else "<") for name in ("name", "", "GPU", *right, "date", "digest"))
    for entry in entries:
        cells = [entry["name"], entry["where"]]
        if "problem" in entry:
            table.add_row(*cells, entry["problem"])
        else:
            cells += [entry["gpu"], f"{entry['shapes']:,}", str(len(entry["operators"]))]
            table.add_row(*cells, entry["date"], entry["digest"][:12])
    return table


def cliffs_table(gpu: str, found: Sequence[ExplainedSweep]) -> Group:
    """One row a sweep: how many dims collapse, the worst of them and what rescues it; then the causes of all."""
    columns = [("sweep", "<"), ("dims", ">"), ("collapsed", ">"), ("worst", ">"), ("period", ">"), ("steps", ">")]
    table = new_table(columns)
    for one in found:
        cliffs, worst = one.cliffs, "none"
        if collapsed := len(cliffs.collapsed):
            at = int(cliffs.slowdown.argmax())
            worst = f"{cliffs.collapsed[at]} -> {cliffs.rescue[at]}, {cliffs.slowdown[at]:.2f}x"
        counts = f"{len(one.sweep):,}", f"{collapsed:,}", worst, str(cliffs.period), f"{len(cliffs.sweet_spots):,}"
        table.add_row(one.sweep.label, *counts)
    return Group(Text(gpu, style="bold"), table, legend(_CLIFFS), Text(_causes(found)))


def _causes(found: Sequence[ExplainedSweep]) -> str:
    causes = [cause for one in found for cause in one.causes]
    if not causes:
        return "no dim is collapsed"
    kinds = Counter("the record does not tell" if cause is None else cause.kind for cause in causes)
    shares = ", ".join(f"{kind} {count / len(causes):.1%}" for kind, count in kinds.most_common())
    return f"causes of the {len(causes):,} collapsed dims: {shares}"


def alignment_table(found: Sequence[ExplainedSweep]) -> Group:
    """The evidence for each sweep's period: how every alignment class keeps up."""
    columns = [("sweep", "<"), ("period", ">"), *(("odd" if step == 1 else str(step), ">") for step in CLASSES)]
    table = new_table(columns)
    for one in found:
        ratios = {of.step: f"{of.slowdown:.2f}{' ' if of.keeps_up else '*'}" for of in one.cliffs.classes}
        table.add_row(one.sweep.label, str(one.cliffs.period), *(ratios.get(step, "- ") for step in CLASSES))
    return Group(table, legend(_ALIGNMENT))


def points_table(one: ExplainedSweep, first: int, last: int) -> Group:
    """Every measured dim from ``first`` to ``last``: its latency, and what would rescue it where it is collapsed."""
    sweep, cliffs = one.sweep, one.cliffs
    columns = [(sweep.axis, ">"), ("us", ">"), ("+-", ">"), ("slower", ">"), ("than", ">"), ("cause", "<")]
    table = new_table([*columns, ("kernels", "<")])
    rows = zip(cliffs.collapsed.tolist(), cliffs.slowdown.tolist(), cliffs.rescue.tolist(), one.causes, strict=True)
    collapsed = {dim: (f"{slow:.2f}x", str(rescue), cause.kind if cause else "?") for dim, slow, rescue, cause in rows}
    points = zip(sweep.dims.tolist(), sweep.ns.tolist(), sweep.iqr.tolist(), sweep.kernels, strict=True)
    for dim, ns, iqr, kernels in points:
        if first <= dim <= last:
            shown = "\n".join(dict.fromkeys(map(_short, kernels)))
            table.add_row(str(dim), f"{ns / 1e3:.1f}", f"{iqr / 2e3:.1f}", *collapsed.get(dim, ("", "", "")), shown)
    return Group(Text(sweep.label, style="bold"), table, legend(_POINTS))


def _short(kernel: str) -> str:
    """A kernel's label; the middle goes if need be."""
    name = describe(kernel).label
    return name if len(name) <= _KERNEL_WIDTH else f"{name[: _KERNEL_WIDTH - 17]}...{name[-14:]}"
