"""Studies of misaligned dims along K, N and head_dim: their cost, and the gain of padding and rounding up."""

from collections.abc import Iterator, Mapping, Sequence

from gac.lab.studies import published
from gac.lab.studies.points import (
    PointAt,
    classes_note,
    gemm,
    gemm_by_k,
    gemm_by_n,
    gemv_by_k,
    median_slowdown,
    round_up,
    sdpa,
    slowdown,
)
from gac.lab.studies.readings import Readings, kernels_note, quotient
from gac.lab.studies.records import Band, Cell, Finding, study
from gac.lab.studies.words import ABSENT, NOISE, close, times
from gac.profiling.operators import operation
from gac.profiling.records import Point

HEAD_DIMS = range(64, 257)
K_DIMS = range(64, 257)
N_DIMS = range(1000, 1065)
GEMV_DIMS = range(4064, 4129)

HEAD_DIM_BAND = Band(1.25, 2.0)
"""Published: 1.3x to 2x where head_dim % 8 != 0 (107 against 112: 1.39x); the lower end has room for noise."""

TIER_BAND = Band(1.25, 2.5)  # published: 25 to 60 % (of the throughput: 1.33x to 2.5x; 107 against 112 is 1.78x)
GEMV_BAND = (ABSENT, 1.25)  # published: about 12 % on K and 4 % on N

RESCUE_BAND = Band(1.2, 2.0)
"""Published: padding a misaligned head_dim to a multiple of 8 wins 1.31x to 1.39x, a K of 107 to 112 wins 1.78x."""


def _misaligned(
    readings: Readings,
    band: Band,
    axis: tuple[str, str],
    point: PointAt,
    dims: Sequence[int],
    figures: tuple[str, Mapping[int, Cell]],
    ending: str,
    *notes: str,
) -> Finding:
    """Cost of misaligned dims along one axis, relative to the next multiple of 8.

    Args:
        axis: its heading, and the plural of its dims.
        dims: the verdict rests on them.
        figures: heading of the published figures, and these figures by the dims that the table shows.
        ending: of the sentence.
    """
    (heading, plural), (theirs, shown) = axis, figures
    return band.finding(
        median_slowdown(readings, point, dims, f"the slowdown of misaligned {plural}"),
        f"{plural} that are no multiple of 8 take {{}} as long as the next multiple{ending}",
        (heading, "measured|ms", "over next multiple of 8|x", theirs),
        [(dim, readings.ms(point(dim)), slowdown(readings, point, dim), figure) for dim, figure in shown.items()],
        classes_note(readings, point, dims, heading),
        *notes,
    )


def _example(readings: Readings, point: PointAt, theirs: str) -> str:
    ratio = readings.ratio(point(107), point(112))
    return "" if ratio is None else f"; 107 takes {ratio:.2f}x as long as 112 (A100: {theirs})"


def head_dim_groups(dims: Sequence[int]) -> dict[str, list[Point]]:
    """Points at aligned and misaligned head_dims, for ``kernels_note``."""
    aligned, others = ([sdpa(d) for d in dims if (d % 8 == 0) == even] for even in (True, False))
    return {"head_dim % 8 == 0": aligned, "the others": others}


@study("sdpa-dense", lambda: map(sdpa, HEAD_DIMS))
def sdpa_dense(readings: Readings) -> Finding:
    figures = published.sdpa_ms("S1")
    shown = {d: figures.get(d) for d in sorted({*figures, 72, 80, 88, 129, 136, 160, 192, 224, 256})}
    ratios = {d: readings.ratio(sdpa(d), sdpa(d + 8)) for d in HEAD_DIMS if d % 8 == 0 and d + 8 in HEAD_DIMS}
    slower = [str(d) for d, ratio in ratios.items() if ratio is not None and ratio > 1.02]
    falls = f"multiples of 8 that are slower than the next one: {', '.join(slower) or 'none'}"
    notes = (falls, *kernels_note(readings, head_dim_groups(HEAD_DIMS)))
    axis, example = ("head_dim", "head dims"), _example(readings, sdpa, "1.39x")
    return _misaligned(readings, HEAD_DIM_BAND, axis, sdpa, HEAD_DIMS, ("A100|ms", shown), example, *notes)


@study("gemm-k", lambda: map(gemm_by_k, K_DIMS))
def gemm_k(readings: Readings) -> Finding:
    figures = published.gemm_ms()
    shown = {k: figures.get(k) for k in sorted({*figures, 104, 105, 106, 108, 120})}
    example = _example(readings, gemm_by_k, "1.78x")
    return _misaligned(readings, TIER_BAND, ("K", "K"), gemm_by_k, K_DIMS, ("A100|ms", shown), example)


@study("gemm-n", lambda: map(gemm_by_n, N_DIMS))
def gemm_n(readings: Readings) -> Finding:
    dims = (1000, 1001, 1002, 1004, 1008, 1016, 1017, 1018, 1020, 1024, 1025, 1032)
    figures = "A100, lost throughput", {n: "25-60 %" if n % 8 else None for n in dims}
    return _misaligned(readings, TIER_BAND, ("N", "N"), gemm_by_n, N_DIMS, figures, " (A100: 1.33x to 2.5x)")


def gemv_by_n(n: int) -> Point:
    """A GEMV 1 x N x 4096."""
    return gemm(1, 4096, n)


@study("gemv", lambda: [point(dim) for point in (gemv_by_k, gemv_by_n) for dim in GEMV_DIMS])
def gemv(readings: Readings) -> Finding:
    k, n = (
        median_slowdown(readings, point, GEMV_DIMS, f"the slowdown of misaligned {axis}")
        for axis, point in (("K", gemv_by_k), ("N", gemv_by_n))
    )
    theirs = {row.axis: 1 + row.cost_percent / 100 for row in published.rows("a100_gemm_sweeps")}
    in_band = GEMV_BAND[0] <= k <= GEMV_BAND[1]
    return Finding(
        ("<axis", "over next multiple of 8|x", "A100|x"),
        (("K", k, theirs["gemv k"]), ("N", n, theirs["gemv n"])),
        as_published=in_band and n <= (1 + NOISE) * k,
        absent=k < ABSENT,
        sentence=f"misaligned K take {times(k, *GEMV_BAND)} as long as the next multiple of 8 and misaligned N "
        f"{times(n)} (A100: 1.12x and 1.04x)",
        notes=(
            classes_note(readings, gemv_by_k, GEMV_DIMS, "K"),
            classes_note(readings, gemv_by_n, GEMV_DIMS, "N"),
            *close("K", k, *GEMV_BAND),
            *(close("N over K", n / k, 1 + NOISE) if in_band else ()),
        ),
    )


# --- repair: zero-padding and rounding up ---


def _paddings() -> Iterator[tuple[str, PointAt, int, int, float | None, float | None]]:
    """Operator, dim, padded dim, and both published latencies in ms."""
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
def padding_rescue(readings: Readings) -> Finding:
    rows: list[tuple[Cell, ...]] = []
    rescues = []
    for operator, point, dim, padded, before, after in _paddings():
        gain = readings.ratio(point(dim), point(padded))
        measured = readings.ms(point(dim)), readings.ms(point(padded)), gain
        rows.append((operator, dim, padded, *measured, before, after, quotient(before, after)))
        if dim % 8 and padded == round_up(dim, 8):
            rescues.append(gain)
    headings = ("as it is|ms", "padded|ms", "won|x")
    return RESCUE_BAND.finding(
        readings.median(rescues, "what padding to a multiple of 8 wins"),
        "zero-padding to the next multiple of 8 makes a misaligned dim {} as fast (A100: 1.31x to 1.78x)",
        ("<operator", "dim", "to", *headings, *(f"A100 {heading}" for heading in headings)),
        rows,
    )


def low_rank_by_r(r: int) -> Point:
    """A low-rank pair 4096 rows, 4096 -> r -> 4096."""
    return Point(operation("low_rank", m=4096, k=4096, r=r, n=4096), "fp16")


_ROUNDED_DIMS = (107, 214, 321)
_STEPS = (8, 16, 32)
_ROUNDED_AXES: dict[str, PointAt] = {"GEMM K": gemm_by_k, "GEMM N": gemm_by_n, "low-rank r": low_rank_by_r}


@study(
    "round-to-aligned",
    lambda: [
        point(round_up(dim, step)) for point in _ROUNDED_AXES.values() for dim in _ROUNDED_DIMS for step in (1, *_STEPS)
    ],
)
def round_to_aligned(readings: Readings) -> Finding:
    figures = published.gemm_ms()
    rows: list[tuple[Cell, ...]] = []
    gains = []
    for name, point in _ROUNDED_AXES.items():
        for dim in _ROUNDED_DIMS:
            ratios = [readings.ratio(point(dim), point(round_up(dim, step))) for step in _STEPS]
            theirs = figures[107] / figures[112] if (name, dim) == ("GEMM K", 107) else None
            rows.append((name, dim, readings.us(point(dim)), *ratios, theirs))
            gains.append(ratios[0])
    return TIER_BAND.finding(
        readings.median(gains, "what rounding up wins"),
        "107, 214 and 321 rounded up to a multiple of 8 run {} as fast (A100, K 107 to 112: 1.78x)",
        ("<axis", "dim", "as it is|us", *(f"won by {step}|x" for step in _STEPS), "A100 by 8|x"),
        rows,
    )
