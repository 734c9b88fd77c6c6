"""Tiles, waves and wasted work: how a GEMM's output is shared out over the SMs.

An SM is taken to work on one tile at a time, as in NVIDIA's Matrix Multiplication Background User's Guide, sections
"Tile Quantization" and "Wave Quantization".
"""

from dataclasses import dataclass
from math import prod

from gac.forms import Operation
from gac.profiling.mechanisms.kernels import Kernel
from gac.profiling.records import Launch


@dataclass(frozen=True)
class Gemm:
    """``batch`` times ``x[m, k] @ W[n, k].T``."""

    m: int
    k: int
    n: int
    batch: int = 1


@dataclass(frozen=True)
class Waves:
    """How ``tiles`` are worked off: ``at_once`` of them at a time, in ``count`` waves, the last one ``last`` full."""

    tiles: int
    at_once: int

    @property
    def count(self) -> int:
        return -(-self.tiles // self.at_once)

    @property
    def last(self) -> float:
        return (self.tiles - (self.count - 1) * self.at_once) / self.at_once


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


def tile_count(gemm: Gemm, tile: tuple[int, int]) -> int:
    """Output tiles of a GEMM; ``tile`` is (features, rows) as in ``Kernel``."""
    return gemm.batch * -(-gemm.n // tile[0]) * -(-gemm.m // tile[1])


def padding(gemm: Gemm, tile: tuple[int, int]) -> float:
    """Fraction of the tiles' area that lies outside the output."""
    return 1 - gemm.batch * gemm.n * gemm.m / (tile_count(gemm, tile) * tile[0] * tile[1])


def waves_of(launch: Launch, kernel: Kernel, sm_count: int, gemm: Gemm | None = None) -> Waves | None:
    """How a launch fills the GPU.

    The grid counts the tiles of a kernel that is not persistent. A persistent one launches at most what runs at once,
    so its tiles are counted from its tile and the GEMM, if both are known; None where they are not. None also for
    kernels that make no tiles (GEMV, copies, reductions), many of whose CTAs share an SM.
    """
    if kernel.role not in {"gemm", "attention"}:
        return None
    ctas = prod(launch.grid)
    if not kernel.persistent:
        return Waves(ctas, sm_count)
    if gemm is None or kernel.tile is None:
        return None
    return Waves(max(tile_count(gemm, kernel.tile), ctas if kernel.split_k else 1), min(ctas, sm_count))
