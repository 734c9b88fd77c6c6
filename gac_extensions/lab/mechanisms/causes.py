"""The kernels that ran at a dim, their tiles and waves, and why a dim is slower than another.

Tile and wave quantisation as in NVIDIA's Matrix Multiplication Background User's Guide. Occupancy is bounded by the
shared memory and the threads that a launch records; registers, which it does not record, may lower it.

A collapsed dim is compared with its rescue, the edge of a staircase with the sweet spot before it. Waves never explain
a collapse by themselves: with the same kernel, the larger dim has at least as many tiles. They show as evidence of a
kernel switch, and they make the edges of staircases.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import ceil, prod
from typing import Literal, NamedTuple

from gac.core.operations import Operation
from gac.profiling.operators import OPERATORS
from gac.profiling.records import Header, Launch
from gac.profiling.table import Sweep
from gac_extensions.lab.cliffs import Cliffs
from gac_extensions.lab.kernel_names import Kernel, describe
from gac_extensions.lab.mechanisms.rules import Setting, parse_capability, row_alignment, unreadable

RESERVED = 1024
"""Bytes of an SM's shared memory that the system reserves for every CTA (compute capability 8.0 and later)."""

_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
_CTAS = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24}
"""Threads and CTAs of an SM, where not 2048 and 32 (CUDA C++ Programming Guide, "Technical Specifications")."""

_SPLITS_IN_Z = {"cutlass", "cublas", "xmma"}
"""Families whose grid counts along z the batch, or the shares of k under split-K."""


class Gemm(NamedTuple):
    """``batch`` times ``x[m, k] @ W[n, k].T``."""

    m: int
    k: int
    n: int
    batch: int = 1


@dataclass(frozen=True)
class Waves:
    """Output ``tiles`` in waves of at most ``concurrent`` CTAs; under split-K tiles count once a share of k.

    Not ``exact``: an SM may hold several CTAs, so that ``count`` is a lower bound.
    """

    tiles: int
    concurrent: int
    exact: bool = True

    @property
    def count(self) -> int:
        return ceil(self.tiles / self.concurrent)

    @property
    def last(self) -> float | None:
        """The filled fraction of the last wave; None where not ``exact``."""
        return (self.tiles - (self.count - 1) * self.concurrent) / self.concurrent if self.exact else None

    def __str__(self) -> str:
        bound = "" if self.exact else "at least "
        last = "" if self.last is None else f", the last {self.last:.0%} full"
        return f"{self.tiles} tiles in {bound}{self.count} wave{'s' if self.count > 1 else ''}{last}"


@dataclass(frozen=True)
class Run:
    """One kernel recorded at a dim, and its GEMM, if known; ``reduced``: a split-K reduction follows."""

    launch: Launch
    kernel: Kernel
    gemm: Gemm | None
    waves: Waves | None
    reduced: bool


def runs_of(sweep: Sweep, dim: int, header: Header) -> tuple[Run, ...]:
    launches = sweep.launches[int(sweep.dims.searchsorted(dim))]
    kernels = [describe(launch.name) for launch in launches]
    gemms = gemms_of(Operation(sweep.operator, (*sweep.fixed, (sweep.axis, dim))))
    known = iter(gemms if len(gemms) == sum(kernel.main for kernel in kernels) else ())
    runs = []
    for index, launch in enumerate(launches):
        gemm = next(known, None) if kernels[index].main else None
        kernel = read_kernel(launch, gemm)
        followers = takewhile(lambda follower: not follower.main, kernels[index + 1 :])
        reduced = any(follower.family == "split-k reduce" for follower in followers)
        runs.append(Run(launch, kernel, gemm, waves_of(launch, kernel, header, gemm), reduced))
    return tuple(runs)


def gemms_of(operation: Operation) -> tuple[Gemm, ...]:
    """List the GEMMs of an operation, in the order of their launches; none where their number is not fixed."""
    axes = operation.axes
    if pairs := axes.get("pairs"):
        return (Gemm(axes["m"], axes["k"], pairs * axes["r"]), *[Gemm(axes["m"], axes["r"], axes["n"])] * pairs)
    gemms = [gemm.axes for gemm in OPERATORS.get(operation.operator).gemms(axes)]
    return tuple(Gemm(gemm["m"], gemm["k"], gemm["n"], gemm.get("b", 1)) for gemm in gemms)


def tile_count(gemm: Gemm, tile: tuple[int, int], cluster: tuple[int, int] = (1, 1)) -> int:
    """Count output tiles; ``tile`` is (features, rows) as in ``Kernel``, both sides rounded up to the cluster."""
    columns = -(-gemm.n // (tile[0] * cluster[0])) * cluster[0]
    rows = -(-gemm.m // (tile[1] * cluster[1])) * cluster[1]
    return gemm.batch * columns * rows


def padding(gemm: Gemm, tile: tuple[int, int]) -> float:
    """Return the fraction of the tiles' area outside the output."""
    return 1 - gemm.batch * gemm.n * gemm.m / (tile_count(gemm, tile) * tile[0] * tile[1])


def read_kernel(launch: Launch, gemm: Gemm | None) -> Kernel:
    """Describe the kernel of a launch; split-K may show in the grid alone."""
    kernel = describe(launch.name)
    return replace(kernel, split_k=True) if _splits(launch, kernel, gemm) > 1 else kernel


def _splits(launch: Launch, kernel: Kernel, gemm: Gemm | None) -> int:
    single = gemm is not None and gemm.batch == 1  # nothing but the shares of k lies along z
    return launch.grid[2] if single and kernel.family in _SPLITS_IN_Z and not kernel.persistent else 1


def occupancy(launch: Launch, header: Header) -> int:
    """Return the most CTAs of a launch that an SM holds, by their shared memory and threads."""
    capability = parse_capability(header.compute_capability)
    threads = _THREADS.get(capability, 2048) // max(prod(launch.block), 1)
    shared = (header.shared_memory_bytes + RESERVED) // (launch.shared_bytes + RESERVED)
    return max(1, min(threads, shared, _CTAS.get(capability, 32)))


def waves_of(launch: Launch, kernel: Kernel, header: Header, gemm: Gemm | None = None) -> Waves | None:
    """Return the waves of a launch; None for kernels without tiles, and persistent ones whose tiles are not known.

    Tiles are counted from the kernel's tile and the GEMM where both are known, since a persistent kernel launches at
    most what runs at once, and other grids may have empty places; else the grid counts them.
    """
    if kernel.role not in {"gemm", "attention"}:
        return None
    ctas, per_sm = prod(launch.grid), occupancy(launch, header)
    concurrent = header.sm_count * per_sm
    if not kernel.persistent:
        tiles = tile_count(gemm, kernel.tile) * _splits(launch, kernel, gemm) if gemm and kernel.tile else ctas
        return Waves(tiles, concurrent, exact=per_sm == 1)
    if not (gemm and kernel.tile):
        return None
    tiles = max(tile_count(gemm, kernel.tile, kernel.cluster or (1, 1)), ctas if kernel.split_k else 1)
    return Waves(tiles, min(ctas, concurrent), exact=per_sm == 1 or ctas <= concurrent)


# --- causes ---

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
        slow, fast: the kernel that ran at the dim, and in its place at the rescue; empty where none did.
    """

    kind: CauseKind
    evidence: str
    slow: str
    fast: str


def causes_of(sweep: Sweep, cliffs: Cliffs, header: Header) -> tuple[Cause | None, ...]:
    """Return the cause of each of ``cliffs.collapsed``, in order; None where the record does not tell."""
    pairs = zip(cliffs.collapsed.tolist(), cliffs.rescue.tolist(), strict=True)
    return tuple(cause_between(sweep, slow, fast, header) for slow, fast in pairs)


def edge_causes(sweep: Sweep, cliffs: Cliffs, header: Header) -> tuple[Cause | None, ...]:
    """Return the cause of each jump from one of ``cliffs.sweet_spots`` to its edge, in order; None where unknown."""
    pairs = zip(cliffs.edges.tolist(), cliffs.sweet_spots.tolist(), strict=True)
    return tuple(cause_between(sweep, slow, fast, header, edge=True) for slow, fast in pairs)


def cause_between(sweep: Sweep, slow: int, fast: int, header: Header, *, edge: bool = False) -> Cause | None:
    """Find the strongest difference between what ran at two measured dims; None where the record does not tell.

    For the ``edge`` of a staircase and its sweet spot waves count, and neither rows nor padding do.
    """
    slow_runs, fast_runs = (runs_of(sweep, dim, header) for dim in (slow, fast))
    if not slow_runs or not fast_runs:
        return None
    names = [[run.launch.name for run in runs] for runs in (slow_runs, fast_runs)]
    setting = Setting(sweep.operator, sweep.axis, sweep.dtype, fixed=sweep.fixed)
    reason = unreadable(slow, setting) if names[0] != names[1] and unreadable(fast, setting) is None else None
    if reason is not None:
        return Cause("no kernel", reason, names[0][0], names[1][0])
    mains = ([run for run in runs if run.kernel.main] for runs in (slow_runs, fast_runs))
    pairs = list(zip(*mains, strict=False))  # the steps that do the arithmetic, as far as both dims have them
    cause = (
        _first("alignment tier", pairs)
        or _first("template", pairs)
        or _extra_kernels(slow_runs, fast_runs)
        or _first("kernel switch", pairs)
    )
    if cause is None and len(slow_runs) < len(fast_runs):
        labels = ", ".join(dict.fromkeys(run.kernel.label for run in fast_runs))
        evidence = f"{len(slow_runs)} kernels ran instead of {len(fast_runs)} at the rescue: {labels}"
        cause = Cause("kernel switch", evidence, names[0][0], names[1][0])
    if cause or edge:
        return cause or _first("wave", pairs)
    ours, theirs = (row_alignment(setting.row_bytes(dim)) for dim in (slow, fast))
    # rows of the result alone do not matter: an H100 takes as long however they are aligned
    if pairs and "k" in setting.sides and ours < theirs:
        evidence = f"the same kernels ran on rows that start at multiples of {ours} bytes instead of {theirs}"
        return Cause("row alignment", evidence, *(run.launch.name for run in pairs[-1]))
    return _first("tile padding", pairs)


def _extra_kernels(slow: Sequence[Run], fast: Sequence[Run]) -> Cause | None:
    """Compare numbers of launches; split-K reductions belong to their GEMM."""
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


def _first(kind: CauseKind, pairs: Sequence[tuple[Run, Run]]) -> Cause | None:
    pair = next((pair for pair in pairs if _differences(*pair)[kind]), None)
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


def _differences(slow: Run, fast: Run) -> Mapping[CauseKind, bool]:
    ours, theirs = slow.kernel, fast.kernel
    roles = {ours.role, theirs.role}
    comparable = "gemv" not in roles and (ours.role != "attention" or ours.family == theirs.family)
    levels = [(ours.tier, theirs.tier), *([(ours.architecture, theirs.architecture)] if ours.role == "gemm" else [])]
    more_padding = 0.0
    if slow.gemm and fast.gemm and ours.tile:
        more_padding = padding(slow.gemm, ours.tile) - padding(fast.gemm, ours.tile)
    return {
        # a kernel that needs less alignment, or was written for an older GPU
        "alignment tier": comparable
        and any(less < more for less, more in levels if less is not None and more is not None),
        "template": "attention" in roles and (ours.family, ours.template_d) != (theirs.family, theirs.template_d),
        "kernel switch": _is_switched(slow, fast),
        "wave": slow.waves is not None and fast.waves is not None and slow.waves.count > fast.waves.count,
        "tile padding": more_padding >= MORE_PADDING,
    }


def _is_switched(slow: Run, fast: Run) -> bool:
    """Return True for another kernel, or for another grid over the same tiles."""
    if slow.launch.name != fast.launch.name or slow.reduced != fast.reduced:
        return True
    same_grid = (slow.launch.grid, slow.launch.block) == (fast.launch.grid, fast.launch.block)
    if same_grid or slow.gemm is None or fast.gemm is None:
        return False
    if slow.kernel.tile is not None:
        return tile_count(slow.gemm, slow.kernel.tile) == tile_count(fast.gemm, slow.kernel.tile)
    return slow.gemm._replace(k=0) == fast.gemm._replace(k=0)
