"""The points of the published settings."""

from collections.abc import Callable

from gac.profiling.operators import operation
from gac.profiling.records import Point
from gac_extensions.lab.studies.readings import Readings

PointAt = Callable[[int], Point]

COPY = Point(operation("copy", n=1 << 27), "bf16")  # 256 MiB, past any L2: its bandwidth is the device's


def gemm(m: int, k: int, n: int, dtype: str = "fp16") -> Point:
    return Point(operation("linear", m=m, k=k, n=n), dtype)


def along(operator: str, axis: str, **fixed: int) -> PointAt:
    return lambda size: Point(operation(operator, **fixed, **{axis: size}), "fp16")


gemm_by_k = along("linear", "k", m=4096, n=4096)
gemm_by_n = along("linear", "n", m=4096, k=4096)
gemv_by_k = along("linear", "k", m=1, n=4096)
gemv_by_n = along("linear", "n", m=1, k=4096)
low_rank_by_r = along("low_rank", "r", m=4096, k=4096, n=4096)


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
