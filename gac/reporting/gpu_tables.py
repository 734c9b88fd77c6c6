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
from gac.reporting.layout import legend, new_table

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
_UNTOLD = "the record does not tell"


class Cause(Protocol):
    """Why a dim is slow; only the kind is shown."""

    @property
    def kind(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Told:
    """One sweep, its cliffs, and the cause of each collapsed dim and of each edge where the record tells it."""

    sweep: Sweep
    cliffs: Cliffs
    causes: tuple[Cause | None, ...]
    edges: tuple[Cause | None, ...]


def profiles_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """The profiles that there are: ``name``, ``where``, and either what is in it or its ``problem``."""
    left, right = ["name", "", "GPU", "date", "digest"], ["shapes", "operators"]
    names = [*left[:3], *right, *left[3:]]
    table = new_table((name, ">" if name in right else "<") for name in names)
    for entry in entries:
        name, where = entry["name"], entry["where"]
        if "problem" in entry:
            table.add_row(name, where, entry["problem"])
            continue
        counts = f"{entry['shapes']:,}", str(len(entry["operators"]))
        table.add_row(name, where, entry["gpu"], *counts, entry["date"], entry["digest"][:12])
    return table


def cliffs_table(gpu: str, found: Sequence[Told]) -> Group:
    """One row a sweep: how many dims collapse, the worst of them and what rescues it; then the causes of all."""
    columns = [("sweep", "<"), ("dims", ">"), ("collapsed", ">"), ("worst", ">"), ("period", ">"), ("steps", ">")]
    rows = [_summary(told.sweep, told.cliffs) for told in found]
    return Group(Text(gpu, style="bold"), new_table(columns, rows), legend(_CLIFFS), Text(_causes(found)))


def _summary(sweep: Sweep, cliffs: Cliffs) -> tuple[str, ...]:
    worst = "none"
    if len(cliffs.collapsed):
        at = int(cliffs.slowdown.argmax())
        worst = f"{cliffs.collapsed[at]} -> {cliffs.rescue[at]}, {cliffs.slowdown[at]:.2f}x"
    counts = f"{len(sweep):,}", f"{len(cliffs.collapsed):,}", worst, str(cliffs.period), f"{len(cliffs.sweet_spots):,}"
    return sweep.label, *counts


def _causes(found: Sequence[Told]) -> str:
    kinds = Counter(_UNTOLD if cause is None else cause.kind for told in found for cause in told.causes)
    total = kinds.total()
    if not total:
        return "no dim is collapsed"
    shares = ", ".join(f"{kind} {count / total:.1%}" for kind, count in kinds.most_common())
    return f"causes of the {total:,} collapsed dims: {shares}"


def alignment_table(found: Sequence[Told]) -> Group:
    """The evidence for each sweep's period: how every alignment class keeps up."""
    columns = [("sweep", "<"), ("period", ">"), *(("odd" if step == 1 else str(step), ">") for step in CLASSES)]
    table = new_table(columns)
    for told in found:
        ratios = {one.step: f"{one.slowdown:.2f}{' ' if one.keeps_up else '*'}" for one in told.cliffs.classes}
        table.add_row(told.sweep.label, str(told.cliffs.period), *(ratios.get(step, "- ") for step in CLASSES))
    return Group(table, legend(_ALIGNMENT))


def points_table(told: Told, first: int, last: int) -> Group:
    """Every measured dim from ``first`` to ``last``: its latency, and what would rescue it where it is collapsed."""
    sweep = told.sweep
    columns = [(sweep.axis, ">"), ("us", ">"), ("+-", ">"), ("slower", ">"), ("than", ">"), ("cause", "<")]
    table = new_table([*columns, ("kernels", "<")])
    collapsed = _collapsed_cells(told)
    points = zip(sweep.dims.tolist(), sweep.ns.tolist(), sweep.iqr.tolist(), sweep.kernels, strict=True)
    for dim, ns, iqr, kernels in points:
        if first <= dim <= last:
            shown = "\n".join(dict.fromkeys(map(_short, kernels)))
            table.add_row(str(dim), f"{ns / 1e3:.1f}", f"{iqr / 2e3:.1f}", *collapsed.get(dim, ("", "", "")), shown)
    return Group(Text(sweep.label, style="bold"), table, legend(_POINTS))


def _collapsed_cells(told: Told) -> dict[int, tuple[str, str, str]]:
    cliffs = told.cliffs
    rows = zip(cliffs.collapsed.tolist(), cliffs.slowdown.tolist(), cliffs.rescue.tolist(), told.causes, strict=True)
    return {
        dim: (f"{slow:.2f}x", str(rescue), "?" if cause is None else cause.kind) for dim, slow, rescue, cause in rows
    }


def _short(kernel: str) -> str:
    """A kernel's label; the middle goes if need be."""
    name = describe(kernel).label
    return name if len(name) <= _KERNEL_WIDTH else f"{name[: _KERNEL_WIDTH - 17]}...{name[-14:]}"
