"""The points of the published settings, and alignment arithmetic on dims."""

from collections.abc import Callable, Iterable, Mapping

from gac.lab.studies.readings import Readings
from gac.lab.studies.records import Band, Cell, Finding
from gac.profiling.operators import operation
from gac.profiling.records import Point

PointAt = Callable[[int], Point]

COPIED = 1 << 27
"""Elements of the copy that says what bandwidth the device has: 256 MiB, past any L2."""


def gemm(m: int, k: int, n: int, dtype: str = "fp16") -> Point:
    """One GEMM (GEMV where m = 1)."""
    return Point(operation("linear", m=m, k=k, n=n), dtype)


def gemm_by_k(k: int) -> Point:
    """The published GEMM 4096 x 4096 x K."""
    return gemm(4096, k, 4096)


def sdpa(d: int, backend: str = "auto", causal: bool = False, dtype: str = "fp16") -> Point:
    """The published attention: B=4 S=2048 H=32."""
    name = "sdpa" + ("" if backend == "auto" else f"_{backend}") + ("_causal" if causal else "")
    return Point(operation(name, b=4, h=32, kv=32, s=2048, t=2048, d=d), dtype)


def copy() -> Point:
    """The copy that says what bandwidth the device has."""
    return Point(operation("copy", n=COPIED), "bf16")


def rounded(dim: int, step: int) -> int:
    """The next multiple of ``step``, the dim itself where it is one."""
    return -(-dim // step) * step


def copied_note(readings: Readings, rest: str = "") -> tuple[str, ...]:
    """What bandwidth the copy reached; nothing where it was refused."""
    measured = readings.gb_s(copy())
    return () if measured is None else (f"a copy of 256 MiB reads and writes {measured:,.0f} GB/s{rest}",)


def slowdown(readings: Readings, at: PointAt, dim: int) -> float | None:
    """A dim's latency over that of the next multiple of 8; None for a multiple of 8."""
    return readings.ratio(at(dim), at(rounded(dim, 8))) if dim % 8 else None


def slowdowns(readings: Readings, at: PointAt, dims: Iterable[int]) -> tuple[float | None, ...]:
    """``slowdown`` of every dim that is no multiple of 8."""
    return tuple(slowdown(readings, at, dim) for dim in dims if dim % 8)


def classes_note(readings: Readings, at: PointAt, dims: Iterable[int], axis: str) -> str:
    """The median slowdown of each alignment class below 8 over the next multiple of 8, in words."""
    steps = {1: f"odd {axis}", 2: f"{axis} % 4 == 2", 4: f"{axis} % 8 == 4"}
    parts = []
    for step, name in steps.items():
        ours = [dim for dim in dims if dim & -dim == step]
        parts.append(f"{name} {readings.middle(slowdowns(readings, at, ours), name):.2f}x")
    return f"median over the next multiple of 8: {', '.join(parts)}"


def along(
    readings: Readings,
    band: Band,
    axis: tuple[str, str],
    at: PointAt,
    dims: Iterable[int],
    shown: Mapping[int, Cell],
    theirs: str,
    rest: str,
    *notes: str,
) -> Finding:
    """What misaligned dims of one axis cost over the next multiple of 8.

    Args:
        axis: its heading, and what its dims are called.
        dims: what the verdict rests on.
        shown: the dims of the table, each with the published figure.
        theirs: the heading of those.
        rest: what the sentence ends with.
    """
    heading, called = axis
    rows = ((dim, readings.ms(at(dim)), slowdown(readings, at, dim), figure) for dim, figure in shown.items())
    return band.finding(
        readings.middle(slowdowns(readings, at, dims), f"the slowdown of misaligned {called}"),
        f"{called} that are no multiple of 8 take {{}} as long as the next multiple{rest}",
        (heading, "measured|ms", "over next multiple of 8|x", theirs),
        rows,
        classes_note(readings, at, dims, heading),
        *notes,
    )


def example(readings: Readings, at: PointAt, theirs: str) -> str:
    """What 107 costs over 112, here and in the published study."""
    ratio = readings.ratio(at(107), at(112))
    return "" if ratio is None else f"; 107 takes {ratio:.2f}x as long as 112 (A100: {theirs})"
