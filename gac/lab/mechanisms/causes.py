"""Why a collapsed dim is slower than the dim that rescues it, from the kernels that were recorded at both.

Waves never explain a collapse by themselves: with the same kernel, the larger dim has at least as many tiles. They show
as evidence of a kernel switch, and they make the edges of staircases (``edges.edge_causes``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from gac.lab.mechanisms.axes import ROWS, element_bytes
from gac.lab.mechanisms.runs import Pair, Run, pairs_of
from gac.lab.mechanisms.sectors import lines_touched, row_alignment
from gac.lab.mechanisms.waves import padding, tile_count
from gac.operations import Operation
from gac.profiling.cliffs import Cliffs
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.records import Header, Launch
from gac.profiling.table import Sweep

CauseKind = Literal[
    "alignment tier", "template", "extra kernels", "kernel switch", "wave", "row alignment", "tile padding"
]

NEARLY_EMPTY = 0.25
"""A last wave that keeps fewer of the SMs busy than this is nearly empty."""

MORE_PADDING = 0.01
"""Padding may differ by this fraction of the tiles' area before it counts as a cause."""


@dataclass(frozen=True)
class Cause:
    """The strongest difference between what ran at a collapsed dim and what ran at its rescue.

    Or between what ran at the edge of a staircase and what ran at the sweet spot before it.

    Attributes:
        kind: ``alignment tier``: a kernel for less aligned operands, or for an older architecture; ``template``:
            another attention backend or head_dim template; ``extra kernels``: copies, paddings or launches that the
            rescue does without; ``kernel switch``: another kernel of the same tier; ``row alignment``: the same kernel
            on operands whose rows lie across more cache lines; ``tile padding``: the same kernel and alignment, less
            of the tiles used; ``wave``: the same kernel in more waves (edges of staircases only).
        evidence: one sentence with the kernels, grids or waves that show it.
        slow: the kernel that ran at the collapsed dim (or edge).
        fast: the kernel that ran in its place at the rescue (or sweet spot); empty where none did.
    """

    kind: CauseKind
    evidence: str
    slow: str
    fast: str


def cause_of(
    slow: Sequence[Launch],
    fast: Sequence[Launch],
    header: Header,
    slow_at: Operation | None = None,
    fast_at: Operation | None = None,
    item_bytes: int = 2,
) -> Cause | None:
    """Why ``slow`` takes longer than ``fast``: the strongest cause that the record shows.

    Args:
        slow: what ran at the collapsed dim, in order.
        fast: what ran at its rescue.
        slow_at, fast_at: the operations; without them the rows are not known, nor the tiles of a persistent kernel.
        item_bytes: bytes of an element of the operands.

    Returns:
        None where the record does not tell: kernels were not recorded, or were the same in every respect.
    """
    if not slow or not fast:
        return None
    pairs = pairs_of(slow, fast, slow_at, fast_at, header)
    return (
        other_kernels(slow, fast, pairs)
        or _row_alignment(pairs, slow_at, fast_at, item_bytes)
        or first_of(_tile_padding, pairs)
    )


def other_kernels(slow: Sequence[Launch], fast: Sequence[Launch], pairs: Sequence[Pair]) -> Cause | None:
    """The cause, where other kernels ran at ``slow`` than at ``fast``; ``pairs`` are their steps."""
    return (
        _tier(pairs)
        or first_of(_template, pairs)
        or _extra(slow, fast)
        or first_of(_switch, pairs)
        or _fewer(slow, fast)
    )


def causes_of(sweep: Sweep, cliffs: Cliffs, header: Header) -> tuple[Cause | None, ...]:
    """The cause of each of ``cliffs.collapsed``, in order; None where the record does not tell."""
    pairs = zip(cliffs.collapsed.tolist(), cliffs.rescue.tolist(), strict=True)
    return tuple(cause_between(sweep, slow, fast, header) for slow, fast in pairs)


def cause_between(sweep: Sweep, slow: int, fast: int, header: Header) -> Cause | None:
    """Why one measured dim of a sweep takes longer than another; None where the record does not tell."""
    before, after = launches_at(sweep, slow), launches_at(sweep, fast)
    at = operation_at(sweep, slow), operation_at(sweep, fast)
    return cause_of(before, after, header, *at, element_bytes(sweep.operator, sweep.dtype))


def launches_at(sweep: Sweep, dim: int) -> tuple[Launch, ...]:
    """What was recorded at a measured dim of a sweep."""
    return sweep.launches[int(sweep.dims.searchsorted(dim))]


def operation_at(sweep: Sweep, dim: int) -> Operation:
    """The operation at one dim of a sweep (its axes in no particular order)."""
    return Operation(sweep.operator, (*sweep.fixed, (sweep.axis, dim)))


def first_of(find: Callable[[Pair], Cause | None], pairs: Sequence[Pair]) -> Cause | None:
    """The first cause that is found, in the order of the steps."""
    return next((cause for cause in map(find, pairs) if cause is not None), None)


def cause_at(kind: CauseKind, pair: Pair, evidence: str) -> Cause:
    """A cause that one step shows."""
    return Cause(kind, evidence, pair.slow.launch.name, pair.fast.launch.name)


def _tier(pairs: Sequence[Pair]) -> Cause | None:
    """A kernel that asks for less alignment, or was written for an older GPU, than the one at the rescue."""
    fallen = [pair for pair in pairs if _fell(pair.slow.kernel, pair.fast.kernel)]
    if not fallen:
        return None
    first, *others = fallen
    slow, fast = first.slow.kernel, first.fast.kernel
    also = "".join(f"; so did {pair.step}" for pair in others)
    evidence = f"{first.step} ran {slow.label} ({_demands(slow)}) instead of {fast.label} ({_demands(fast)}){also}"
    return cause_at("alignment tier", first, evidence)


def _fell(slow: Kernel, fast: Kernel) -> bool:
    if slow.role == "gemv" or fast.role == "gemv" or (slow.role == "attention" and slow.family != fast.family):
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
        return cause_at("template", pair, f"{_backend(slow)} instead of {_backend(fast)}")
    if slow.template_d == fast.template_d:
        return None
    sizes = f"head_dim {slow.template_d} instead of {fast.template_d}"
    return cause_at("template", pair, f"attention ran the {slow.family} kernel compiled for {sizes}")


def _backend(kernel: Kernel) -> str:
    return f"{kernel.family} served attention ({kernel.label})" if kernel.role == "attention" else kernel.label


def _extra(slow: Sequence[Launch], fast: Sequence[Launch]) -> Cause | None:
    """Launches beyond those of the rescue, split-k reductions apart (they belong to their GEMM)."""
    before, after = _families(slow), _families(fast)
    rest = list(after)
    extra = []
    for launch, family in zip(slow, before, strict=True):
        if family in rest:
            rest.remove(family)
        elif family:
            extra.append(launch)
    count = sum(map(bool, before)) - sum(map(bool, after))
    if count <= 0 or not extra:
        return None
    names = ", ".join(
        dict.fromkeys(f"{describe(launch.name).family}: {describe(launch.name).label}" for launch in extra)
    )
    evidence = f"{len(slow)} kernels ran instead of {len(fast)}; more than at the rescue: {names}"
    return Cause("extra kernels", evidence, extra[0].name, "")


def _families(launches: Sequence[Launch]) -> list[str]:
    """Family of each launch, GEMMs of every library counted as one; empty for a reduction."""
    kernels = [describe(launch.name) for launch in launches]
    return ["" if kernel.role == "reduce" else kernel.role if kernel.main else kernel.family for kernel in kernels]


def _switch(pair: Pair) -> Cause | None:
    """Another kernel, or the same one with k shared out differently."""
    slow, fast = pair.slow, pair.fast
    if slow.launch.name != fast.launch.name:
        same = (slow.kernel.label, slow.kernel.even_k) == (fast.kernel.label, fast.kernel.even_k)
        other = " (with other template arguments)" if same else ""
        evidence = f"{pair.step} ran {_config(slow)}{other} instead of {_config(fast)}{_waves(slow, fast)}"
        return cause_at("kernel switch", pair, evidence)
    if slow.reduced != fast.reduced:
        words = ("with", "without") if slow.reduced else ("without", "with")
        evidence = f"{pair.step} ran {slow.kernel.label} {words[0]} a split-k reduction, the rescue {words[1]} one"
        return cause_at("kernel switch", pair, evidence)
    if _same_outputs(slow, fast) and (slow.launch.grid, slow.launch.block) != (fast.launch.grid, fast.launch.block):
        evidence = f"{pair.step} ran {slow.kernel.label} on {_extent(slow.launch)} instead of {_extent(fast.launch)}"
        return cause_at("kernel switch", pair, evidence)
    return None


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
    kernel = run.kernel
    even = "" if kernel.even_k is None else f" (is_even_K {str(kernel.even_k).lower()})"
    return f"{kernel.label}{even}{' and a split-k reduction' if run.reduced else ''} on {_grid(run.launch)}"


def _grid(launch: Launch) -> str:
    return f"{prod(launch.grid)} CTA{'s' if prod(launch.grid) > 1 else ''}"


def _fewer(slow: Sequence[Launch], fast: Sequence[Launch]) -> Cause | None:
    """The rescue runs more kernels, and other ones: the operation is carried out another way."""
    if len(slow) >= len(fast):
        return None
    names = ", ".join(dict.fromkeys(describe(launch.name).label for launch in fast))
    evidence = f"{len(slow)} kernels ran; the rescue is carried out in {len(fast)}: {names}"
    return Cause("kernel switch", evidence, slow[0].name, fast[0].name)


def _row_alignment(
    pairs: Sequence[Pair], slow_at: Operation | None, fast_at: Operation | None, item_bytes: int
) -> Cause | None:
    """The same kernels, reading rows that begin at smaller powers of two within a cache line than the rescue's."""
    if slow_at is None or fast_at is None or not pairs:
        return None
    moved = [axis for axis, size in slow_at.shape if fast_at.axes[axis] != size]
    sides = ROWS.get((slow_at.operator, moved[0]), "") if len(moved) == 1 else ""
    if "k" not in sides:
        return None  # rows of the result alone: on an H100 the same launches take as long however those are aligned
    slow, fast = (at.axes[moved[0]] * item_bytes for at in (slow_at, fast_at))
    if row_alignment(slow) >= row_alignment(fast):
        return None
    evidence = (
        f"the same kernels ran on rows of {slow} bytes, multiples of {row_alignment(slow)} instead of "
        f"{row_alignment(fast)}: 128 bytes of a row lie on {lines_touched(slow):.2f} cache lines on average instead of "
        f"{lines_touched(fast):.2f}"
    )
    return Cause("row alignment", evidence, pairs[-1].slow.launch.name, pairs[-1].fast.launch.name)


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
    return cause_at("tile padding", pair, evidence)
