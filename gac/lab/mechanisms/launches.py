"""The kernels that ran at a dim, and how the output tiles of a GEMM are shared out over the SMs.

Tile and wave quantisation as in NVIDIA's Matrix Multiplication Background User's Guide. Occupancy is bounded by the
shared memory and the threads that a launch records; registers, which it does not record, may lower it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod
from typing import NamedTuple

from gac.core.operations import Operation
from gac.lab.mechanisms.setting import parse_capability
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.operators import OPERATORS
from gac.profiling.records import Header, Launch

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

    ``exact``: an SM can hold only one CTA, or the kernel launches no more than run at once. Else ``count`` is a lower
    bound.
    """

    tiles: int
    concurrent: int
    exact: bool = True

    @property
    def count(self) -> int:
        return -(-self.tiles // self.concurrent)

    @property
    def last(self) -> float | None:
        """Filled fraction of the last wave; None where not ``exact``."""
        return (self.tiles - (self.count - 1) * self.concurrent) / self.concurrent if self.exact else None

    def __str__(self) -> str:
        bound = "" if self.exact else "at least "
        last = "" if self.last is None else f", the last {self.last:.0%} full"
        return f"{self.tiles} tiles in {bound}{self.count} wave{'s' if self.count > 1 else ''}{last}"


@dataclass(frozen=True)
class Run:
    """One kernel that was recorded at a dim.

    Attributes:
        kernel: read from its name and grid.
        gemm: the GEMM that it computes; None where it computes none, or an unknown one.
        waves: None where not known.
        reduced: True where a split-K reduction follows.
    """

    launch: Launch
    kernel: Kernel
    gemm: Gemm | None
    waves: Waves | None
    reduced: bool


def runs_of(launches: Sequence[Launch], operation: Operation, header: Header) -> tuple[Run, ...]:
    """The kernels recorded at an operation, in order."""
    kernels = [describe(launch.name) for launch in launches]
    gemms = gemms_of(operation)
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
    """The GEMMs of an operation, in the order of their launches; none where their number is not fixed."""
    axes = operation.axes
    if pairs := axes.get("pairs"):
        return (Gemm(axes["m"], axes["k"], pairs * axes["r"]), *[Gemm(axes["m"], axes["r"], axes["n"])] * pairs)
    gemms = [gemm.axes for gemm in OPERATORS.get(operation.operator).gemms(axes)]
    return tuple(Gemm(gemm["m"], gemm["k"], gemm["n"], gemm.get("b", 1)) for gemm in gemms)


def tile_count(gemm: Gemm, tile: tuple[int, int], cluster: tuple[int, int] = (1, 1)) -> int:
    """Output tiles; ``tile`` is (features, rows) as in ``Kernel``, both sides rounded up to the cluster."""
    columns = -(-gemm.n // (tile[0] * cluster[0])) * cluster[0]
    rows = -(-gemm.m // (tile[1] * cluster[1])) * cluster[1]
    return gemm.batch * columns * rows


def padding(gemm: Gemm, tile: tuple[int, int]) -> float:
    """Fraction of the tiles' area outside the output."""
    return 1 - gemm.batch * gemm.n * gemm.m / (tile_count(gemm, tile) * tile[0] * tile[1])


def read_kernel(launch: Launch, gemm: Gemm | None) -> Kernel:
    """Describe the kernel of a launch; split-K may show in the grid alone."""
    kernel = describe(launch.name)
    return replace(kernel, split_k=True) if _splits(launch, kernel, gemm) > 1 else kernel


def _splits(launch: Launch, kernel: Kernel, gemm: Gemm | None) -> int:
    single = gemm is not None and gemm.batch == 1  # nothing but the shares of k lies along z
    return launch.grid[2] if single and kernel.family in _SPLITS_IN_Z and not kernel.persistent else 1


def occupancy(launch: Launch, header: Header) -> int:
    """Most CTAs of a launch that an SM holds, by their shared memory and threads."""
    capability = parse_capability(header.compute_capability)
    threads = _THREADS.get(capability, 2048) // max(prod(launch.block), 1)
    shared = (header.shared_memory_bytes + RESERVED) // (launch.shared_bytes + RESERVED)
    return max(1, min(threads, shared, _CTAS.get(capability, 32)))


def waves_of(launch: Launch, kernel: Kernel, header: Header, gemm: Gemm | None = None) -> Waves | None:
    """Waves in which the GPU works off a launch.

    Tiles are counted from the kernel's tile and the GEMM where both are known, since a persistent kernel launches at
    most what runs at once, and other grids may have empty places; else the grid counts them.

    Returns:
        None for kernels without tiles (GEMV, copies, reductions), and persistent ones whose tiles are not known.
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
