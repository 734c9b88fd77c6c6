"""Studies of misaligned dims along K, N and head_dim: their cost, and the gain of padding and rounding up."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gac.profiling.records import Point
from gac_extensions.lab.studies import published
from gac_extensions.lab.studies.points import (
    PointAt,
    gemm_by_k,
    gemm_by_n,
    gemv_by_k,
    gemv_by_n,
    low_rank_by_r,
    round_up,
    sdpa,
)
from gac_extensions.lab.studies.readings import Readings, close, kernels_note, quotient, times
from gac_extensions.lab.studies.records import Band, Cell, Finding, study

HEAD_DIMS = range(64, 257)
K_DIMS = range(64, 257)
N_DIMS = range(1000, 1065)
GEMV_DIMS = range(4064, 4129)


def _slowdown(readings: Readings, point: PointAt, dim: int) -> float | None:
    """Return the latency at a dim over that at the next multiple of 8; None for a multiple of 8."""
    return readings.ratio(point(dim), point(round_up(dim, 8))) if dim % 8 else None


def _median_slowdown(readings: Readings, point: PointAt, dims: Iterable[int], name: str) -> float:
    return readings.median((_slowdown(readings, point, dim) for dim in dims), name)


def _classes_note(readings: Readings, point: PointAt, dims: Iterable[int], axis: str) -> str:
    parts = []
    for step, name in ((1, f"odd {axis}"), (2, f"{axis} % 4 == 2"), (4, f"{axis} % 8 == 4")):
        members = [dim for dim in dims if dim & -dim == step]
        parts.append(f"{name} {_median_slowdown(readings, point, members, name):.2f}x")
    return f"median over the next multiple of 8: {', '.join(parts)}"


def _misaligned(
    readings: Readings,
    band: Mapping[str, Any],
    axis: str,
    point: PointAt,
    dims: Sequence[int],
    figures: Mapping[int, Cell],
    *notes: str,
    example: str | None = None,
) -> Finding:
    """Judge the cost of misaligned dims along one axis, relative to the next multiple of 8.

    Args:
        figures: the published figures, by the dims that the table shows.
        example: the published slowdown of 107 against 112.
    """
    plural = "head dims" if axis == "head_dim" else axis
    ratio = None if example is None else readings.ratio(point(107), point(112))
    return Band(**band).finding(
        _median_slowdown(readings, point, dims, f"the slowdown of misaligned {plural}"),
        [(dim, readings.ms(point(dim)), _slowdown(readings, point, dim), figure) for dim, figure in figures.items()],
        _classes_note(readings, point, dims, axis),
        *notes,
        example="" if ratio is None else f"; 107 takes {ratio:.2f}x as long as 112 (A100: {example})",
    )


def _with_others(figures: Mapping[int, float | None], *others: int) -> dict[int, Cell]:
    return {dim: figures.get(dim) for dim in sorted({*figures, *others})}


def head_dim_groups(dims: Sequence[int]) -> dict[str, list[Point]]:
    aligned, others = ([sdpa(d) for d in dims if (d % 8 == 0) == even] for even in (True, False))
    return {"head_dim % 8 == 0": aligned, "the others": others}


@study("sdpa-dense", lambda: map(sdpa, HEAD_DIMS))
def sdpa_dense(readings: Readings, **band: Any) -> Finding:
    figures = _with_others(published.sdpa_ms("S1"), 72, 80, 88, 129, 136, 160, 192, 224, 256)
    ratios = {d: readings.ratio(sdpa(d), sdpa(d + 8)) for d in HEAD_DIMS if d % 8 == 0 and d + 8 in HEAD_DIMS}
    slower = [str(d) for d, ratio in ratios.items() if ratio is not None and ratio > 1.02]
    falls = f"multiples of 8 that are slower than the next one: {', '.join(slower) or 'none'}"
    notes = (falls, *kernels_note(readings, head_dim_groups(HEAD_DIMS)))
    return _misaligned(readings, band, "head_dim", sdpa, HEAD_DIMS, figures, *notes, example="1.39x")


@study("gemm-k", lambda: map(gemm_by_k, K_DIMS))
def gemm_k(readings: Readings, **band: Any) -> Finding:
    figures = _with_others(published.gemm_ms(), 104, 105, 106, 108, 120)
    return _misaligned(readings, band, "K", gemm_by_k, K_DIMS, figures, example="1.78x")


@study("gemm-n", lambda: map(gemm_by_n, N_DIMS))
def gemm_n(readings: Readings, **band: Any) -> Finding:
    dims = (1000, 1001, 1002, 1004, 1008, 1016, 1017, 1018, 1020, 1024, 1025, 1032)
    figures = {n: "25-60 %" if n % 8 else None for n in dims}
    return _misaligned(readings, band, "N", gemm_by_n, N_DIMS, figures)


@study("gemv", lambda: [point(dim) for point in (gemv_by_k, gemv_by_n) for dim in GEMV_DIMS])
def gemv(readings: Readings, least: float, most: float, noise: float) -> Finding:
    axes = {"K": gemv_by_k, "N": gemv_by_n}
    k, n = (
        _median_slowdown(readings, point, GEMV_DIMS, f"the slowdown of misaligned {axis}")
        for axis, point in axes.items()
    )
    theirs = {row.axis: 1 + row.cost_percent / 100 for row in published.rows("a100_gemm_sweeps")}
    in_band = least <= k <= most
    return Finding(
        (("K", k, theirs["gemv k"]), ("N", n, theirs["gemv n"])),
        as_published=in_band and n <= (1 + noise) * k,
        absent=k < least,
        values={"k": times(k, least, most), "n": times(n)},
        notes=(
            *(_classes_note(readings, point, GEMV_DIMS, axis) for axis, point in axes.items()),
            *close("K", k, least, most),
            *(close("N over K", n / k, 1 + noise) if in_band else ()),
        ),
    )


# --- repair: zero-padding and rounding up ---


def _paddings() -> Iterator[tuple[str, PointAt, int, int, float | None, float | None]]:
    """Yield operator, dim, padded dim, and both published latencies in ms."""
    for row in published.rows("a100_repair"):
        to_8, to_16 = round_up(row.head_dim, 8), round_up(row.head_dim, 16)
        if to_8 != row.head_dim:
            yield "sdpa", sdpa, row.head_dim, to_8, row.original_ms, row.pad_to_8_ms
        if to_16 != to_8:
            yield "sdpa", sdpa, row.head_dim, to_16, row.original_ms, row.pad_to_16_ms
    dense, by_k = published.sdpa_ms("S1"), published.gemm_ms()
    yield "sdpa", sdpa, 107, 128, dense[107], dense[128]
    for padded in (112, 128):
        yield "GEMM K", gemm_by_k, 107, padded, by_k[107], by_k[padded]


@study("padding-rescue", lambda: [point(size) for _, point, dim, padded, *_ in _paddings() for size in (dim, padded)])
def padding_rescue(readings: Readings, **band: Any) -> Finding:
    rows: list[tuple[Cell, ...]] = []
    rescues = []
    for operator, point, dim, padded, before, after in _paddings():
        gain = readings.ratio(point(dim), point(padded))
        measured = readings.ms(point(dim)), readings.ms(point(padded)), gain
        rows.append((operator, dim, padded, *measured, before, after, quotient(before, after)))
        if dim % 8 and padded == round_up(dim, 8):
            rescues.append(gain)
    return Band(**band).finding(readings.median(rescues, "what padding to a multiple of 8 wins"), rows)


_ROUNDED_DIMS = (107, 214, 321)
_STEPS = (8, 16, 32)
_ROUNDED_AXES: dict[str, PointAt] = {"GEMM K": gemm_by_k, "GEMM N": gemm_by_n, "low-rank r": low_rank_by_r}


def _rounded_points() -> Iterator[Point]:
    for point in _ROUNDED_AXES.values():
        yield from (point(round_up(dim, step)) for dim in _ROUNDED_DIMS for step in (1, *_STEPS))


@study("round-to-aligned", _rounded_points)
def round_to_aligned(readings: Readings, **band: Any) -> Finding:
    figures = published.gemm_ms()
    rows: list[tuple[Cell, ...]] = []
    gains = []
    for name, point in _ROUNDED_AXES.items():
        for dim in _ROUNDED_DIMS:
            ratios = [readings.ratio(point(dim), point(round_up(dim, step))) for step in _STEPS]
            theirs = figures[107] / figures[112] if (name, dim) == ("GEMM K", 107) else None
            rows.append((name, dim, readings.us(point(dim)), *ratios, theirs))
            gains.append(ratios[0])
    return Band(**band).finding(readings.median(gains, "what rounding up wins"), rows)
