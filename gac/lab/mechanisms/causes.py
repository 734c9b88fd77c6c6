"""Why a dim is slower than another, from the kernels that were recorded at both.

A collapsed dim is compared with the dim that rescues it, the edge of a staircase with the sweet spot before it. Waves
never explain a collapse by themselves: with the same kernel, the larger dim has at least as many tiles. They show as
evidence of a kernel switch, and they make the edges of staircases.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod

from gac.core.operations import Operation
from gac.lab.mechanisms.axes import ROWS, Setting
from gac.lab.mechanisms.explanation import Cause, CauseKind
from gac.lab.mechanisms.runs import Pair, Run, padding, pairs_of, runs_of, tile_count
from gac.lab.mechanisms.sectors import lines_touched, row_alignment
from gac.lab.mechanisms.stored import unread
from gac.profiling.cliffs import Cliffs
from gac.profiling.kernel_names import Kernel
from gac.profiling.records import Header, Launch
from gac.profiling.table import Sweep

NEARLY_EMPTY = 0.25
"""A last wave that keeps fewer of the SMs busy than this is nearly empty."""

MORE_PADDING = 0.01
"""Padding may differ by this fraction of the tiles' area before it counts as a cause."""


def cause_of(
    slow: Sequence[Launch],
    fast: Sequence[Launch],
    header: Header,
    slow_at: Operation,
    fast_at: Operation,
    item_bytes: int = 2,
    *,
    edge: bool = False,
) -> Cause | None:
    """Why ``slow`` takes longer than ``fast``: the strongest cause that the record shows.

    Args:
        slow: what ran at the collapsed dim, in order.
        fast: what ran at its rescue.
        slow_at, fast_at: the operations.
        item_bytes: bytes of an element of the operands.
        edge: whether the dims are the edge of a staircase and its sweet spot; then waves count, and neither rows nor
            padding do.

    Returns:
        None where the record does not tell: kernels were not recorded, or were the same in every respect.
    """
    if not slow or not fast:
        return None
    before, after = runs_of(slow, slow_at, header), runs_of(fast, fast_at, header)
    pairs = pairs_of(before, after)
    other = _other_kernels(before, after, pairs)
    if other is not None or edge:
        return other or _first(_more_waves, pairs)
    return _row_alignment(pairs, slow_at, fast_at, item_bytes) or _first(_tile_padding, pairs)


def cause_between(sweep: Sweep, slow: int, fast: int, header: Header, *, edge: bool = False) -> Cause | None:
    """Why one measured dim of a sweep takes longer than another; None where the record does not tell."""
    before, after = (sweep.launches[int(sweep.dims.searchsorted(dim))] for dim in (slow, fast))
    setting = Setting(sweep.operator, sweep.axis, sweep.dtype, fixed=sweep.fixed)
    others = before and after and [one.name for one in before] != [one.name for one in after]
    if others and unread(fast, setting) is None and (reason := unread(slow, setting)) is not None:
        return Cause("no kernel", reason, before[0].name, after[0].name)
    slow_at, fast_at = (operation_at(sweep, dim) for dim in (slow, fast))
    return cause_of(before, after, header, slow_at, fast_at, setting.element_bytes, edge=edge)


def causes_of(sweep: Sweep, cliffs: Cliffs, header: Header) -> tuple[Cause | None, ...]:
    """The cause of each of ``cliffs.collapsed``, in order; None where the record does not tell."""
    pairs = zip(cliffs.collapsed.tolist(), cliffs.rescue.tolist(), strict=True)
    return tuple(cause_between(sweep, slow, fast, header) for slow, fast in pairs)


def edge_causes(sweep: Sweep, cliffs: Cliffs, header: Header) -> tuple[Cause | None, ...]:
    """The cause of each jump from one of ``cliffs.sweet_spots`` to its edge, in order.

    Another kernel has the kinds that ``cause_of`` gives it (``kernel switch``, ``template``, ...); the same one in more
    waves is a ``wave``. ``slow`` is what ran at the edge, ``fast`` what ran at the sweet spot.

    Returns:
        None where the record does not tell.
    """
    pairs = zip(cliffs.edges.tolist(), cliffs.sweet_spots.tolist(), strict=True)
    return tuple(cause_between(sweep, slow, fast, header, edge=True) for slow, fast in pairs)


def operation_at(sweep: Sweep, dim: int) -> Operation:
    """The operation at one dim of a sweep (its axes in no particular order)."""
    return Operation(sweep.operator, (*sweep.fixed, (sweep.axis, dim)))


def _other_kernels(slow: Sequence[Run], fast: Sequence[Run], pairs: Sequence[Pair]) -> Cause | None:
    """The cause, where other kernels ran at ``slow`` than at ``fast``; ``pairs`` are their steps."""
    return (
        _tier(pairs) or _first(_template, pairs) or _extra(slow, fast) or _first(_switch, pairs) or _fewer(slow, fast)
    )


def _first(find: Callable[[Pair], Cause | None], pairs: Sequence[Pair]) -> Cause | None:
    """The first cause that is found, in the order of the steps."""
    return next(filter(None, map(find, pairs)), None)


def _at(pair: Pair, kind: CauseKind, evidence: str) -> Cause:
    """A cause that one step shows."""
    return Cause(kind, evidence, pair.slow.launch.name, pair.fast.launch.name)


def _tier(pairs: Sequence[Pair]) -> Cause | None:
    """A kernel that asks for less alignment, or was written for an older GPU, than the one at the rescue."""
    fallen = [pair for pair in pairs if _fell(pair.slow.kernel, pair.fast.kernel)]
    if not fallen:
        return None
    first, *others = fallen
    slow, fast = (f"{run.kernel.label} ({_demands(run.kernel)})" for run in (first.slow, first.fast))
    also = "".join(f"; so did {pair.step}" for pair in others)
    return _at(first, "alignment tier", f"{first.step} ran {slow} instead of {fast}{also}")


def _fell(slow: Kernel, fast: Kernel) -> bool:
    if "gemv" in {slow.role, fast.role} or (slow.role == "attention" and slow.family != fast.family):
        return False
    return _less(slow.tier, fast.tier) or (slow.role == "gemm" and _less(slow.architecture, fast.architecture))


def _less(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one < other


def _demands(kernel: Kernel) -> str:
    parts = [] if kernel.architecture is None else [f"sm{kernel.architecture}"]
    if kernel.tier is not None:
        parts.append(f"operands aligned to {kernel.tier} element{'s' if kernel.tier > 1 else ''}")
    return ", ".join(parts)


def _template(pair: Pair) -> Cause | None:
    """Another attention backend, or the same one compiled for another head_dim."""
    slow, fast = pair.slow.kernel, pair.fast.kernel
    if "attention" not in {slow.role, fast.role}:
        return None
    if slow.family != fast.family:
        return _at(pair, "template", f"{_backend(slow)} instead of {_backend(fast)}")
    if slow.template_d == fast.template_d:
        return None
    sizes = f"head_dim {slow.template_d} instead of {fast.template_d}"
    return _at(pair, "template", f"attention ran the {slow.family} kernel compiled for {sizes}")


def _backend(kernel: Kernel) -> str:
    return f"{kernel.family} served attention ({kernel.label})" if kernel.role == "attention" else kernel.label


def _extra(slow: Sequence[Run], fast: Sequence[Run]) -> Cause | None:
    """Launches beyond those of the rescue, split-k reductions apart (they belong to their GEMM)."""
    ours, rest = ([run for run in runs if run.kernel.role != "reduce"] for runs in (slow, fast))
    left = Counter(map(_family, rest))
    extra = []
    for run in ours:
        left[_family(run)] -= 1
        if left[_family(run)] < 0:
            extra.append(run)
    if len(ours) <= len(rest):
        return None
    names = ", ".join(dict.fromkeys(f"{run.kernel.family}: {run.kernel.label}" for run in extra))
    evidence = f"{len(slow)} kernels ran instead of {len(fast)}; more than at the rescue: {names}"
    return Cause("extra kernels", evidence, extra[0].launch.name, "")


def _family(run: Run) -> str:
    """Its family, GEMMs of every library counted as one."""
    return run.kernel.role if run.kernel.main else run.kernel.family


def _switch(pair: Pair) -> Cause | None:
    """Another kernel, or the same one with k shared out differently."""
    slow, fast = pair.slow, pair.fast
    if slow.launch.name != fast.launch.name:
        same = (slow.kernel.label, slow.kernel.even_k) == (fast.kernel.label, fast.kernel.even_k)
        other = " (with other template arguments)" if same else ""
        ran = f"{_config(slow)}{other} instead of {_config(fast)}{_waves(slow, fast)}"
    elif slow.reduced != fast.reduced:
        words = ("with", "without") if slow.reduced else ("without", "with")
        ran = f"{slow.kernel.label} {words[0]} a split-k reduction, the rescue {words[1]} one"
    elif _same_outputs(slow, fast) and (slow.launch.grid, slow.launch.block) != (fast.launch.grid, fast.launch.block):
        ran = f"{slow.kernel.label} on {_extent(slow.launch)} instead of {_extent(fast.launch)}"
    else:
        return None
    return _at(pair, "kernel switch", f"{pair.step} ran {ran}")


def _waves(slow: Run, fast: Run) -> str:
    """More waves than the other kernel, or a last one that is nearly empty, where the record tells exactly."""
    one, other = slow.waves, fast.waves
    if one is None or other is None or one.last is None or other.last is None:
        return ""
    if one.count > other.count:
        return f": {one.count} waves instead of {other.count}"
    if one.count > 1 and one.last < NEARLY_EMPTY <= other.last:
        return f": the last of its {one.count} waves is {one.last:.0%} full"
    return ""


def _same_outputs(slow: Run, fast: Run) -> bool:
    """Whether both make as many outputs or tiles, so that another grid means another way to share out the work."""
    if slow.gemm is None or fast.gemm is None:
        return False
    if slow.kernel.tile is not None:
        return tile_count(slow.gemm, slow.kernel.tile) == tile_count(fast.gemm, slow.kernel.tile)
    return (slow.gemm.m, slow.gemm.n, slow.gemm.batch) == (fast.gemm.m, fast.gemm.n, fast.gemm.batch)


def _extent(launch: Launch) -> str:
    grid, block = ("x".join(map(str, extent)) for extent in (launch.grid, launch.block))
    return f"a grid of {grid} CTAs of {block} threads"


def _config(run: Run) -> str:
    kernel, ctas = run.kernel, prod(run.launch.grid)
    even = "" if kernel.even_k is None else f" (is_even_K {str(kernel.even_k).lower()})"
    reduced = " and a split-k reduction" if run.reduced else ""
    return f"{kernel.label}{even}{reduced} on {ctas} CTA{'s' if ctas > 1 else ''}"


def _fewer(slow: Sequence[Run], fast: Sequence[Run]) -> Cause | None:
    """The rescue runs more kernels, and other ones: the operation is carried out another way."""
    if len(slow) >= len(fast):
        return None
    names = ", ".join(dict.fromkeys(run.kernel.label for run in fast))
    evidence = f"{len(slow)} kernels ran; the rescue is carried out in {len(fast)}: {names}"
    return Cause("kernel switch", evidence, slow[0].launch.name, fast[0].launch.name)


def _more_waves(pair: Pair) -> Cause | None:
    """The same kernel in more waves; at least so many where an SM may hold several of its CTAs."""
    slow, fast = pair.slow.waves, pair.fast.waves
    if slow is None or fast is None or slow.count <= fast.count:
        return None
    bound = "" if slow.exact and fast.exact else "at least "
    evidence = (
        f"{pair.step} ran {pair.slow.kernel.label} in {bound}{slow.count} waves of {slow.at_once} instead of "
        f"{fast.count} ({slow.tiles} tiles instead of {fast.tiles})"
    )
    return _at(pair, "wave", evidence)


def _row_alignment(pairs: Sequence[Pair], slow_at: Operation, fast_at: Operation, item_bytes: int) -> Cause | None:
    """The same kernels, reading rows that begin at smaller powers of two within a cache line than the rescue's."""
    moved = [axis for axis, size in slow_at.shape if fast_at.axes[axis] != size]
    if not pairs or len(moved) != 1 or "k" not in ROWS.get((slow_at.operator, moved[0]), ""):
        return None  # rows of the result alone: on an H100 the same launches take as long however those are aligned
    slow, fast = (at.axes[moved[0]] * item_bytes for at in (slow_at, fast_at))
    if row_alignment(slow) >= row_alignment(fast):
        return None
    evidence = (
        f"the same kernels ran on rows of {slow} bytes, multiples of {row_alignment(slow)} instead of "
        f"{row_alignment(fast)}: 128 bytes of a row lie on {lines_touched(slow):.2f} cache lines on average instead of "
        f"{lines_touched(fast):.2f}"
    )
    return _at(pairs[-1], "row alignment", evidence)


def _tile_padding(pair: Pair) -> Cause | None:
    """The same kernel on as many tiles, of which less is used."""
    slow, fast, tile = pair.slow.gemm, pair.fast.gemm, pair.slow.kernel.tile
    if slow is None or fast is None or tile is None:
        return None
    before, after = padding(slow, tile), padding(fast, tile)
    if before - after < MORE_PADDING:
        return None
    size = f"{tile[0]}x{tile[1]}"
    evidence = (
        f"{pair.step} ran {pair.slow.kernel.label}; {before:.1%} of its {size} tiles is padding instead of {after:.1%}"
    )
    return _at(pair, "tile padding", evidence)
