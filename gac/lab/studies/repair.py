"""Studies of repair: what zero-padding or rounding up a dim wins back."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from gac.lab.studies import published
from gac.lab.studies.gemms import TIER_BAND, gemm_by_n
from gac.lab.studies.readings import Readings, quotient
from gac.lab.studies.records import Band, Cell, Finding, study
from gac.lab.studies.shapes import PointAt, gemm_by_k, rounded, sdpa
from gac.profiling.operators import operation
from gac.profiling.records import Point

RESCUE_BAND = Band(1.2, 2.0)
"""Published: padding a misaligned head_dim to a multiple of 8 wins 1.31x to 1.39x, a K of 107 to 112 wins 1.78x."""

ROUNDED_DIMS = (107, 214, 321)
STEPS = (8, 16, 32)


def _paddings() -> Iterator[tuple[str, int, int, float | None, float | None]]:
    """Operator, dim, padded dim, and both published latencies in ms."""
    for row in published.rows("a100_repair"):
        to_8, to_16 = rounded(row.head_dim, 8), rounded(row.head_dim, 16)
        if to_8 != row.head_dim:
            yield "sdpa", row.head_dim, to_8, row.original_ms, row.pad_to_8_ms
        if to_16 != to_8:
            yield "sdpa", row.head_dim, to_16, row.original_ms, row.pad_to_16_ms
    dense, by_k = published.sdpa_ms("S1"), published.gemm_ms()
    yield "sdpa", 107, 128, dense[107], dense[128]
    for padded in (112, 128):
        yield "GEMM K", 107, padded, by_k[107], by_k[padded]


def _at(operator: str) -> PointAt:
    return sdpa if operator == "sdpa" else gemm_by_k


def _padding_points() -> tuple[Point, ...]:
    return tuple(_at(operator)(size) for operator, dim, padded, _, _ in _paddings() for size in (dim, padded))


@study(
    "padding-rescue",
    "zero-padding: 107 to 112 and 128, and others",
    "zero-padding 107 to 112 takes attention (head_dim) from 2.064 to 1.490 ms and a GEMM (K) from 0.089 to 0.050 ms",
    "GAC's study, repair and experiment G3, A100-80GB, B=4 S=2048 H=32 and 4096 x 4096 x K, fp16",
    RESCUE_BAND.rule("median over misaligned dims of latency over that zero-padded to the next multiple of 8"),
    _padding_points,
)
def padding_rescue(readings: Readings) -> Finding:
    rows: list[tuple[Cell, ...]] = []
    rescues = []
    for operator, dim, padded, before, after in _paddings():
        at = _at(operator)
        won = readings.ratio(at(dim), at(padded))
        ours = readings.ms(at(dim)), readings.ms(at(padded)), won
        rows.append((operator, dim, padded, *ours, before, after, quotient(before, after)))
        if dim % 8 and padded == rounded(dim, 8):
            rescues.append(won)
    return RESCUE_BAND.finding(
        readings.middle(rescues, "what padding to a multiple of 8 wins"),
        "zero-padding to the next multiple of 8 makes a misaligned dim {} as fast (A100: 1.31x to 1.78x)",
        (
            *("<operator", "dim", "to", "as it is|ms", "padded|ms", "won|x"),
            *("A100 as it is|ms", "A100 padded|ms", "A100 won|x"),
        ),
        rows,
    )


def low_rank_by_r(r: int) -> Point:
    """A low-rank pair 4096 rows, 4096 -> r -> 4096."""
    return Point(operation("low_rank", m=4096, k=4096, r=r, n=4096), "fp16")


_ROUNDED_AT: Mapping[str, PointAt] = MappingProxyType(
    {"GEMM K": gemm_by_k, "GEMM N": gemm_by_n, "low-rank r": low_rank_by_r}
)


def _rounding_points() -> tuple[Point, ...]:
    return tuple(at(rounded(dim, step)) for at in _ROUNDED_AT.values() for dim in ROUNDED_DIMS for step in (1, *STEPS))


@study(
    "round-to-aligned",
    "107, 214 and 321 as they are and rounded up",
    "rounding a dim up to a multiple of 8 makes it faster, not slower (K 107 to 112: 0.089 to 0.050 ms)",
    "GAC's study, experiment G3, A100-80GB, GEMM 4096 x 4096 x K fp16; 214 and 321 have no published figure",
    TIER_BAND.rule("median over dims and axes of latency over that rounded up to a multiple of 8"),
    _rounding_points,
)
def round_to_aligned(readings: Readings) -> Finding:
    figures = published.gemm_ms()
    rows: list[tuple[Cell, ...]] = []
    wins = []
    for name, at in _ROUNDED_AT.items():
        for dim in ROUNDED_DIMS:
            won = [readings.ratio(at(dim), at(rounded(dim, step))) for step in STEPS]
            theirs = figures[107] / figures[112] if (name, dim) == ("GEMM K", 107) else None
            rows.append((name, dim, readings.us(at(dim)), *won, theirs))
            wins.append(won[0])
    return TIER_BAND.finding(
        readings.middle(wins, "what rounding up wins"),
        "107, 214 and 321 rounded up to a multiple of 8 run {} as fast (A100, K 107 to 112: 1.78x)",
        ("<axis", "dim", "as it is|us", *(f"won by {step}|x" for step in STEPS), "A100 by 8|x"),
        rows,
    )
