"""The points of the published settings, and the cost of misaligned dims along one of their axes."""

from collections.abc import Callable, Iterable

from gac.lab.studies.readings import Readings
from gac.profiling.operators import operation
from gac.profiling.records import Point

PointAt = Callable[[int], Point]

COPY = Point(operation("copy", n=1 << 27), "bf16")  # 256 MiB, past any L2: its bandwidth is the device's


def gemm(m: int, k: int, n: int, dtype: str = "fp16") -> Point:
    return Point(operation("linear", m=m, k=k, n=n), dtype)


def gemm_by_k(k: int) -> Point:
    return gemm(4096, k, 4096)


def gemm_by_n(n: int) -> Point:
    return gemm(4096, 4096, n)


def gemv_by_k(k: int) -> Point:
    return gemm(1, k, 4096)


def gemv_by_n(n: int) -> Point:
    return gemm(1, 4096, n)


def low_rank_by_r(r: int) -> Point:
    return Point(operation("low_rank", m=4096, k=4096, r=r, n=4096), "fp16")


def sdpa(d: int, backend: str = "auto", causal: bool = False, dtype: str = "fp16") -> Point:
    """Return the published attention: B=4 S=2048 H=32."""
    name = "sdpa" + ("" if backend == "auto" else f"_{backend}") + ("_causal" if causal else "")
    return Point(operation(name, b=4, h=32, kv=32, s=2048, t=2048, d=d), dtype)


def copy_note(readings: Readings, rest: str = "") -> tuple[str, ...]:
    """Note the bandwidth that the copy reached; empty where it was refused."""
    measured = readings.gb_s(COPY)
    return () if measured is None else (f"a copy of 256 MiB reads and writes {measured:,.0f} GB/s{rest}",)


def round_up(dim: int, step: int) -> int:
    return -(-dim // step) * step


def slowdown(readings: Readings, point: PointAt, dim: int) -> float | None:
    """Return the latency at a dim over that at the next multiple of 8; None for a multiple of 8."""
    return readings.ratio(point(dim), point(round_up(dim, 8))) if dim % 8 else None


def median_slowdown(readings: Readings, point: PointAt, dims: Iterable[int], name: str) -> float:
    """Return the median over dims that are no multiple of 8; RefusedError where all were refused."""
    return readings.median((slowdown(readings, point, dim) for dim in dims), name)


def classes_note(readings: Readings, point: PointAt, dims: Iterable[int], axis: str) -> str:
    """Note the median slowdown of each alignment class below 8."""
    classes = {1: f"odd {axis}", 2: f"{axis} % 4 == 2", 4: f"{axis} % 8 == 4"}
    parts = []
    for step, name in classes.items():
        members = [dim for dim in dims if dim & -dim == step]
        parts.append(f"{name} {median_slowdown(readings, point, members, name):.2f}x")
    return f"median over the next multiple of 8: {', '.join(parts)}"
