"""What ran at a dim, launch by launch, and how a GEMM's output is shared out over the SMs: tiles, waves, wasted work.

Tile and wave quantisation as in NVIDIA's Matrix Multiplication Background User's Guide. How many CTAs an SM holds is
bounded by what a launch records, shared memory and threads; registers, which it does not record, may hold fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod

from gac.core.operations import Operation
from gac.lab.mechanisms.axes import version
from gac.lab.mechanisms.sectors import RESERVED
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.records import Header, Launch

_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
_CTAS = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24}
"""Threads and CTAs that an SM holds, where not 2048 and 32 (CUDA C++ Programming Guide, "Technical Specifications")."""

_ORDINALS = ("first", "second", "third", "fourth")

_SPLITS_IN_Z = {"cutlass", "cublas", "xmma"}
"""Families whose grid counts along z what a GEMM is repeated for: the batch, or the shares of k."""


@dataclass(frozen=True)
class Gemm:
    """``batch`` times ``x[m, k] @ W[n, k].T``."""

    m: int
    k: int
    n: int
    batch: int = 1


@dataclass(frozen=True)
class Waves:
    """How ``tiles`` are worked off, ``at_once`` of them at a time.

    Attributes:
        tiles: output tiles; with k split, as many for each share of it.
        at_once: how many run at a time; at most so many where not ``exact``.
        exact: whether an SM can hold only one CTA, or the kernel launches no more than run at once.
    """

    tiles: int
    at_once: int
    exact: bool = True

    @property
    def count(self) -> int:
        """In how many waves; in at least so many where not ``exact``."""
        return -(-self.tiles // self.at_once)

    @property
    def last(self) -> float | None:
        """How full the last wave is; None where not ``exact``."""
        return (self.tiles - (self.count - 1) * self.at_once) / self.at_once if self.exact else None


def gemms_of(operation: Operation) -> tuple[Gemm, ...]:
    """The GEMMs of an operation, in the order in which they are launched; none where they are not a fixed few."""
    axes = operation.axes
    if operation.operator in {"linear", "linear_rowwise", "int4_linear", "int4_linear_dequantised"}:
        return (Gemm(axes["m"], axes["k"], axes["n"]),)
    if operation.operator == "batched_gemm":
        return (Gemm(axes["m"], axes["k"], axes["n"], axes["b"]),)
    if operation.operator in {"low_rank", "low_rank_shared"}:
        pairs = axes.get("pairs", 1)
        second = Gemm(axes["m"], axes["r"], axes["n"])
        return (Gemm(axes["m"], axes["k"], pairs * axes["r"]), *(second for _ in range(pairs)))
    return ()


def tile_count(gemm: Gemm, tile: tuple[int, int], cluster: tuple[int, int] = (1, 1)) -> int:
    """Output tiles of a GEMM; ``tile`` is (features, rows) as in ``Kernel``, both sides rounded up to the cluster."""
    across = -(-gemm.n // (tile[0] * cluster[0])) * cluster[0]
    down = -(-gemm.m // (tile[1] * cluster[1])) * cluster[1]
    return gemm.batch * across * down


def padding(gemm: Gemm, tile: tuple[int, int]) -> float:
    """Fraction of the tiles' area that lies outside the output."""
    return 1 - gemm.batch * gemm.n * gemm.m / (tile_count(gemm, tile) * tile[0] * tile[1])


def read(launch: Launch, gemm: Gemm | None) -> Kernel:
    """What a launch tells of its kernel: its name, and of k being split also its grid, which the name may conceal."""
    kernel = describe(launch.name)
    return replace(kernel, split_k=True) if _shares(launch, kernel, gemm) > 1 else kernel


def _shares(launch: Launch, kernel: Kernel, gemm: Gemm | None) -> int:
    """Into how many shares k is split, by the grid: a single GEMM has nothing else along z."""
    single = gemm is not None and gemm.batch == 1
    return launch.grid[2] if single and kernel.family in _SPLITS_IN_Z and not kernel.persistent else 1


def resident(launch: Launch, header: Header) -> int:
    """How many CTAs of a launch an SM holds at most, by their shared memory and threads."""
    capability = version(header.compute_capability)
    threads = _THREADS.get(capability, 2048) // max(prod(launch.block), 1)
    shared = (header.shared_memory_bytes + RESERVED) // (launch.shared_bytes + RESERVED)
    return max(1, min(threads, shared, _CTAS.get(capability, 32)))


def waves_of(launch: Launch, kernel: Kernel, header: Header, gemm: Gemm | None = None) -> Waves | None:
    """How a launch fills the GPU.

    A persistent kernel launches at most what runs at once, so its tiles are counted from its tile and the GEMM. So are
    those of other kernels where both are known, since a grid may have empty places; else the grid counts them.

    Returns:
        None for a persistent kernel whose tiles are not known, and for kernels that make no tiles (GEMV, copies,
        reductions).
    """
    if kernel.role not in {"gemm", "attention"}:
        return None
    counted = None if gemm is None or kernel.tile is None else (gemm, kernel.tile)
    ctas, most = prod(launch.grid), resident(launch, header)
    room = header.sm_count * most
    if not kernel.persistent:
        tiles = ctas if counted is None else tile_count(*counted) * _shares(launch, kernel, gemm)
        return Waves(tiles, room, exact=most == 1)
    if counted is None:
        return None
    tiles = tile_count(*counted, kernel.cluster or (1, 1))
    return Waves(max(tiles, ctas if kernel.split_k else 1), min(ctas, room), exact=most == 1 or ctas <= room)


# --- launch by launch -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One kernel that was recorded at a dim.

    Attributes:
        launch: as it was recorded.
        kernel: what its name and grid tell.
        gemm: the GEMM that it computes; None where it computes none, or which is not known.
        waves: how the SMs work off its tiles; None where not known.
        reduced: whether a split-k reduction follows it.
    """

    launch: Launch
    kernel: Kernel
    gemm: Gemm | None
    waves: Waves | None
    reduced: bool


@dataclass(frozen=True)
class Pair:
    """The same step of the operation at two dims: the collapsed one and its rescue, or an edge and its sweet spot."""

    step: str
    slow: Run
    fast: Run


def runs_of(launches: Sequence[Launch], at: Operation, header: Header) -> tuple[Run, ...]:
    """The kernels recorded at an operation, in order."""
    kernels = [describe(launch.name) for launch in launches]
    gemms = gemms_of(at)
    known = iter(gemms if len(gemms) == sum(kernel.main for kernel in kernels) else ())
    found = []
    for place, launch in enumerate(launches):
        gemm = next(known, None) if kernels[place].main else None
        kernel = read(launch, gemm)
        rest = takewhile(lambda after: not after.main, kernels[place + 1 :])
        reduced = any(after.family == "split-k reduce" for after in rest)
        found.append(Run(launch, kernel, gemm, waves_of(launch, kernel, header, gemm), reduced))
    return tuple(found)


def pairs_of(slow: Sequence[Run], fast: Sequence[Run]) -> list[Pair]:
    """The steps that do the arithmetic at both dims, in order, as far as both have them."""
    before, after = ([run for run in runs if run.kernel.main] for runs in (slow, fast))
    return [
        Pair(_step(place, len(before), old.kernel), old, new)
        for place, (old, new) in enumerate(zip(before, after, strict=False))
    ]


def _step(place: int, count: int, kernel: Kernel) -> str:
    if kernel.role == "attention":
        return "attention"
    if count == 1:
        return "the GEMM"
    return f"the {_ORDINALS[place]} GEMM" if place < len(_ORDINALS) else f"GEMM {place + 1}"
