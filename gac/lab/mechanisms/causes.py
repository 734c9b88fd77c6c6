"""Why a dim is slower than another, from the kernels that were recorded at both.

A collapsed dim is compared with its rescue, the edge of a staircase with the sweet spot before it. Waves never explain
a collapse by themselves: with the same kernel, the larger dim has at least as many tiles. They show as evidence of a
kernel switch, and they make the edges of staircases.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gac.core.operations import Operation
from gac.lab.mechanisms.checks import unreadable
from gac.lab.mechanisms.launches import Run, padding, runs_of, tile_count
from gac.lab.mechanisms.setting import Setting, row_alignment
from gac.profiling.cliffs import Cliffs
from gac.profiling.records import Header
from gac.profiling.table import Sweep

MORE_PADDING = 0.01  # padding that differs by less than this fraction of the tiles' area is no cause

CauseKind = Literal[
    "no kernel", "alignment tier", "template", "extra kernels", "kernel switch", "wave", "row alignment", "tile padding"
]


@dataclass(frozen=True)
class Cause:
    """The strongest difference between what ran at a collapsed dim (or an edge) and at its rescue (or sweet spot).

    Attributes:
        kind: ``no kernel``: the kernels of the scheme's storage do not read such a matrix, and others ran; ``alignment
            tier``: a kernel for less aligned operands, or for an older architecture; ``template``: another attention
            backend or head_dim template; ``extra kernels``: copies, paddings or launches that the rescue does without;
            ``kernel switch``: another kernel of the same tier; ``row alignment``: the same kernel on operands whose
            rows start at smaller powers of two; ``tile padding``: the same kernel and alignment, less of the tiles
            used; ``wave``: the same kernel in more waves (edges of staircases only).
        evidence: one sentence with the kernels, grids or waves that show it.
        slow: the kernel that ran at the collapsed dim (or edge).
        fast: the kernel that ran in its place at the rescue (or sweet spot); empty where none did.
    """

    kind: CauseKind
    evidence: str
    slow: str
    fast: str


def causes_of(sweep: Sweep, cliffs: Cliffs, header: Header) -> tuple[Cause | None, ...]:
    """The cause of each of ``cliffs.collapsed``, in order; None where the record does not tell."""
    pairs = zip(cliffs.collapsed.tolist(), cliffs.rescue.tolist(), strict=True)
    return tuple(cause_between(sweep, slow, fast, header) for slow, fast in pairs)


def edge_causes(sweep: Sweep, cliffs: Cliffs, header: Header) -> tuple[Cause | None, ...]:
    """The cause of each jump from one of ``cliffs.sweet_spots`` to its edge, in order; None where unknown."""
    pairs = zip(cliffs.edges.tolist(), cliffs.sweet_spots.tolist(), strict=True)
    return tuple(cause_between(sweep, slow, fast, header, edge=True) for slow, fast in pairs)


def cause_between(sweep: Sweep, slow: int, fast: int, header: Header, *, edge: bool = False) -> Cause | None:
    """The strongest difference between what ran at two measured dims of a sweep.

    Args:
        edge: for the edge of a staircase and its sweet spot: waves count, and neither rows nor padding do.

    Returns:
        None where the record does not tell: kernels were not recorded, or were the same in every respect.
    """
    before, after = (sweep.launches[int(sweep.dims.searchsorted(dim))] for dim in (slow, fast))
    if not before or not after:
        return None
    setting = Setting(sweep.operator, sweep.axis, sweep.dtype, fixed=sweep.fixed)
    others = [launch.name for launch in before] != [launch.name for launch in after]
    if others and unreadable(fast, setting) is None and (reason := unreadable(slow, setting)) is not None:
        return Cause("no kernel", reason, before[0].name, after[0].name)
    slow_runs, fast_runs = (
        runs_of(launches, operation_at(sweep, dim), header) for launches, dim in ((before, slow), (after, fast))
    )
    mains = ([run for run in runs if run.kernel.main] for runs in (slow_runs, fast_runs))
    pairs = list(zip(*mains, strict=False))  # the steps that do the arithmetic, as far as both dims have them
    cause = (
        _first("alignment tier", _has_lower_tier, pairs)
        or _first("template", _has_other_template, pairs)
        or _extra_kernels(slow_runs, fast_runs)
        or _first("kernel switch", _is_switched, pairs)
    )
    if cause is None and len(before) < len(after):
        names = ", ".join(dict.fromkeys(run.kernel.label for run in fast_runs))
        evidence = f"{len(before)} kernels ran instead of {len(after)} at the rescue: {names}"
        cause = Cause("kernel switch", evidence, before[0].name, after[0].name)
    if cause or edge:
        return cause or _first("wave", _has_more_waves, pairs)
    ours, theirs = (row_alignment(setting.row_bytes(dim)) for dim in (slow, fast))
    # rows of the result alone do not matter: an H100 takes as long however they are aligned
    if pairs and "k" in setting.sides and ours < theirs:
        evidence = f"the same kernels ran on rows that start at multiples of {ours} bytes instead of {theirs}"
        return Cause("row alignment", evidence, *(run.launch.name for run in pairs[-1]))
    return _first("tile padding", _has_more_padding, pairs)


def operation_at(sweep: Sweep, dim: int) -> Operation:
    """The operation at one dim of a sweep (its axes in no particular order)."""
    return Operation(sweep.operator, (*sweep.fixed, (sweep.axis, dim)))


def _extra_kernels(slow: Sequence[Run], fast: Sequence[Run]) -> Cause | None:
    """Launches beyond those of the rescue; split-K reductions belong to their GEMM."""
    ours, theirs = ([run for run in runs if run.kernel.role != "reduce"] for runs in (slow, fast))
    if len(ours) <= len(theirs):
        return None
    remaining, extra = Counter(map(_family, theirs)), []
    for run in ours:
        remaining[_family(run)] -= 1
        if remaining[_family(run)] < 0:
            extra.append(run)
    names = ", ".join(dict.fromkeys(f"{run.kernel.family}: {run.kernel.label}" for run in extra))
    evidence = f"{len(slow)} kernels ran instead of {len(fast)}; more than at the rescue: {names}"
    return Cause("extra kernels", evidence, extra[0].launch.name, "")


def _family(run: Run) -> str:
    return run.kernel.role if run.kernel.main else run.kernel.family  # GEMMs of all libraries count as one


# --- causes that one step of the operation shows ---


def _first(kind: CauseKind, differs: Callable[[Run, Run], bool], pairs: Sequence[tuple[Run, Run]]) -> Cause | None:
    pair = next((pair for pair in pairs if differs(*pair)), None)
    if pair is None:
        return None
    slow, fast = map(_describe, pair)
    return Cause(kind, f"{slow} ran instead of {fast}", *(run.launch.name for run in pair))


def _describe(run: Run) -> str:
    kernel = run.kernel
    numbers = {"sm": kernel.architecture, "align": kernel.tier, "head_dim ": kernel.template_d}
    details = [f"{name}{number}" for name, number in numbers.items() if number is not None]
    if kernel.even_k is not None:
        details.append(f"is_even_K {str(kernel.even_k).lower()}")
    details.append(f"grid {'x'.join(map(str, run.launch.grid))}")
    if run.waves is not None:
        details.append(str(run.waves))
    if run.gemm and kernel.tile:
        details.append(f"{padding(run.gemm, kernel.tile):.1%} padding")
    if run.reduced:
        details.append("split-K reduction")
    return f"{kernel.label} ({', '.join(details)})"


def _has_lower_tier(slow: Run, fast: Run) -> bool:
    """A kernel that needs less alignment, or was written for an older GPU."""
    ours, theirs = slow.kernel, fast.kernel
    if "gemv" in {ours.role, theirs.role} or (ours.role == "attention" and ours.family != theirs.family):
        return False
    return _less(ours.tier, theirs.tier) or (ours.role == "gemm" and _less(ours.architecture, theirs.architecture))


def _less(ours: int | None, theirs: int | None) -> bool:
    return ours is not None and theirs is not None and ours < theirs


def _has_other_template(slow: Run, fast: Run) -> bool:
    (ours, *slow_template), (theirs, *fast_template) = (
        (run.kernel.role, run.kernel.family, run.kernel.template_d) for run in (slow, fast)
    )
    return "attention" in {ours, theirs} and slow_template != fast_template


def _is_switched(slow: Run, fast: Run) -> bool:
    if slow.launch.name != fast.launch.name or slow.reduced != fast.reduced:
        return True
    same_grid = (slow.launch.grid, slow.launch.block) == (fast.launch.grid, fast.launch.block)
    if same_grid or slow.gemm is None or fast.gemm is None:
        return False
    if slow.kernel.tile is not None:
        return tile_count(slow.gemm, slow.kernel.tile) == tile_count(fast.gemm, slow.kernel.tile)
    return slow.gemm._replace(k=0) == fast.gemm._replace(k=0)


def _has_more_waves(slow: Run, fast: Run) -> bool:
    return slow.waves is not None and fast.waves is not None and slow.waves.count > fast.waves.count


def _has_more_padding(slow: Run, fast: Run) -> bool:
    if slow.gemm is None or fast.gemm is None or slow.kernel.tile is None:
        return False
    return padding(slow.gemm, slow.kernel.tile) - padding(fast.gemm, slow.kernel.tile) >= MORE_PADDING
