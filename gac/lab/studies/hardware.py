"""Studies of the hardware hypotheses H1, H2 and H4: Tensor Core tiles, L2 sectors, the width of loads."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from gac.lab.mechanisms.sectors import fetched_over_used, vector_bytes
from gac.lab.studies import published
from gac.lab.studies.gemms import GEMV_DIMS, gemv_by_k
from gac.lab.studies.readings import Readings
from gac.lab.studies.records import ABSENT, Band, Cell, Finding, close, percent, study, times
from gac.lab.studies.served import instead, kernels_note
from gac.lab.studies.shapes import PointAt, copied_note, copy, gemm, gemm_by_k
from gac.profiling.records import Point

DIMS = range(100, 129)
"""K of the published classes (105 to 128), and the class members between them."""

CLASSES: Mapping[str, int] = MappingProxyType(
    {"K % 16 == 0": 16, "K % 16 == 8": 8, "K % 8 == 4": 4, "K % 4 == 2": 2, "odd K": 1}
)
"""Alignment classes, by the largest power of two up to 16 that divides K."""

ITEM_BYTES = 2

TILE_LOST = (0.45, 0.75)
"""Published: odd K lose 56 to 59 % of the throughput, up to 58-70 % in the summary."""

EIGHT_LOST = 0.10
"""K % 16 == 8 loses at least this much where the tile's 16 matters (published: 16 %)."""

NO_LOSS = 0.15
"""Short of this no throughput is lost: a time that does not depend on K at all already loses 12 % at odd K."""

LOAD_LOST = Band(0.35, 0.75, absent=NO_LOSS, write=percent)
"""Published: throughput falls by about 50 % (39-40 against 73-83 TFLOP/s)."""

MAIN_CAUSE = 1 / 3
"""A main cause explains at least this share of what misaligned dims cost."""


def _members(step: int, dims: Sequence[int]) -> list[int]:
    """The dims that ``step`` divides and that twice the step does not, except for the coarsest class."""
    return [dim for dim in dims if dim % step == 0 and (step == 16 or dim % (2 * step))]


def tile_by_k(k: int) -> Point:
    """The published GEMM 8192 x 8192 x K."""
    return gemm(8192, k, 8192)


def _medians(
    readings: Readings, of: Callable[[Point], float | None], at: PointAt, dims: Sequence[int], what: str
) -> dict[str, float]:
    """The median of a figure in each class."""
    return {
        name: readings.middle([of(at(k)) for k in _members(step, dims)], what.format(name))
        for name, step in CLASSES.items()
    }


def _served(readings: Readings, at: PointAt, dims: Sequence[int]) -> tuple[str, ...]:
    """Which kernels serve each class: a loss between different kernels is not alignment's alone."""
    return kernels_note(readings, {name: [at(k) for k in _members(step, dims)] for name, step in CLASSES.items()})


_PUBLISHED_TILES: Mapping[str, str] = MappingProxyType(
    {
        "K % 16 == 0": "16-aligned (112,128)",
        "K % 16 == 8": "8-aligned only (104,120)",
        "K % 8 == 4": "4-aligned (108,116)",
        "odd K": "odd (105,107)",
    }
)


@study(
    "tensor-core",
    "hypothesis H1: the Tensor Core tile, GEMM 8192 x 8192 x K",
    "K % 16 == 0 reaches 91.1 TFLOP/s, K % 16 == 8 76.8, K % 8 == 4 61-71, odd K 37-40: up to 58 % is lost",
    "GAC's study, experiment C23 (H1), A100-80GB, GEMM 8192 x 8192 x K fp16",
    f"rule: medians of the classes over K 100 to 128; held where odd K lose {percent(TILE_LOST[0])} to "
    f"{percent(TILE_LOST[1])} and K % 16 == 8 at least {percent(EIGHT_LOST)}, did not hold where odd K lose less than "
    f"{percent(NO_LOSS)}, other otherwise",
    lambda: tuple(tile_by_k(k) for k in DIMS),
)
def tensor_core(readings: Readings) -> Finding:
    figures = {row.k: row.tflops for row in published.rows("a100_gemm", study="C23")}
    ours = _medians(readings, readings.tflops, tile_by_k, DIMS, "the throughput of {}")
    full = ours["K % 16 == 0"]
    rows = (
        (name, value, 100 * (1 - value / full), figures.get(_PUBLISHED_TILES.get(name))) for name, value in ours.items()
    )
    odd, eight = 1 - ours["odd K"] / full, 1 - ours["K % 16 == 8"] / full
    held = TILE_LOST[0] <= odd <= TILE_LOST[1] and eight >= EIGHT_LOST
    said = (
        f"against {full:.0f} TFLOP/s at K % 16 == 0, odd K reach {ours['odd K']:.0f} "
        f"({percent(odd, NO_LOSS, *TILE_LOST)} lost, A100: 58 %) and K % 16 == 8 {ours['K % 16 == 8']:.0f} "
        f"({percent(eight, EIGHT_LOST)} lost, A100: 16 %)"
    )
    notes = (
        *_served(readings, tile_by_k, DIMS),
        *close("odd K lose", odd, NO_LOSS, *TILE_LOST, write=percent),
        *close("K % 16 == 8 loses", eight, EIGHT_LOST, write=percent),
    )
    table = ("<class", "measured|TFLOP/s", "lost|%", "A100|TFLOP/s")
    return Finding(table, rows, held, odd < NO_LOSS, said, notes)


@study(
    "vector-width",
    "hypothesis H4: the width of loads, by the alignment of rows",
    "rows aligned to 16 bytes allow wide loads (68-83 TFLOP/s), odd K scalar ones (39-40): throughput falls by 50 %",
    "GAC's study, experiment C23 (H4), A100-80GB, fp16",
    f"rule: GEMM 4096 x 4096 x K, medians of the classes over K 100 to 128; held where odd K lose "
    f"{percent(LOAD_LOST.least)} to {percent(LOAD_LOST.most)} of the throughput at K % 16 == 0, did not hold below "
    f"{percent(NO_LOSS)}, other beyond",
    lambda: (*(gemm_by_k(k) for k in DIMS), *(gemv_by_k(k) for k in GEMV_DIMS), copy()),
)
def vector_width(readings: Readings) -> Finding:
    figures = {row.case: row.tflops for row in published.rows("a100_hypotheses", hypothesis="H4")}
    tflops = _medians(readings, readings.tflops, gemm_by_k, DIMS, "the throughput of {}")
    gemm_gb_s = _medians(readings, readings.gb_s, gemm_by_k, DIMS, "the bandwidth of a class")
    gemv_gb_s = _medians(readings, readings.gb_s, gemv_by_k, GEMV_DIMS, "the bandwidth of a class")
    lost, gemv_lost = (1 - rates["odd K"] / rates["K % 16 == 0"] for rates in (tflops, gemv_gb_s))
    rows = (
        (name, vector_bytes(ITEM_BYTES * step), tflops[name], gemm_gb_s[name], gemv_gb_s[name], figures.get(name))
        for name, step in CLASSES.items()
    )
    return LOAD_LOST.finding(
        lost,
        f"odd K (two-byte loads, and {_other_kernel(readings, gemm_by_k, DIMS)}) lose {{}} of a GEMM's throughput "
        f"(A100: 50 %) and {percent(gemv_lost)} of a GEMV's bandwidth "
        f"({_other_kernel(readings, gemv_by_k, GEMV_DIMS)})",
        ("<class", "widest load|bytes", "GEMM|TFLOP/s", "GEMM|GB/s", "GEMV|GB/s", "A100 GEMM|TFLOP/s"),
        rows,
        "load: the widest that the alignment of rows allows, not measured; GB/s: the fewest bytes to move, a second",
        *copied_note(readings),
    )


def _other_kernel(readings: Readings, at: PointAt, dims: Sequence[int]) -> str:
    """Whether odd K are served by another kernel than K % 16 == 0."""
    return instead(readings, (at(k) for k in _members(1, dims)), (at(k) for k in _members(16, dims)))


SECTOR_DIMS = range(96, 161)


_SECTORS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"K % 16 == 0": (16,), "K % 16 == 8": (8,), "K % 8 != 0": (4, 2, 1)}
)
"""Rows of whole sectors; rows that break only the sector rule; rows that break the 16-byte rule too."""

_SECTOR_SIZES: Mapping[str, tuple[PointAt, range]] = MappingProxyType(
    {"GEMM 4096 x 4096 x K": (gemm_by_k, SECTOR_DIMS), "GEMV 1 x 4096 x K": (gemv_by_k, GEMV_DIMS)}
)


@study(
    "l2-sector",
    "hypothesis H2: L2 sectors of 32 bytes",
    "L2 sectors are not a main cause: 5.8 % of the bytes are fetched in vain, bandwidth does not fall (209, 215 GB/s)",
    "GAC's study, experiment C23 (H2), A100-80GB, fp16",
    "rule: cost over the line between the multiples of 16 on both sides; held where rows that break only the sector "
    f"rule (K % 16 == 8) cost at most {percent(MAIN_CAUSE)} of what misaligned rows cost, other where they cost more, "
    f"did not hold where neither costs {ABSENT:.2f}x",
    lambda: (*(gemm_by_k(k) for k in SECTOR_DIMS), *(gemv_by_k(k) for k in GEMV_DIMS)),
)
def l2_sector(readings: Readings) -> Finding:
    hypothesis = published.rows("a100_hypotheses", hypothesis="H2")
    figures = {row.case: (row.gb_s, row.wasted_percent) for row in hypothesis}
    rows: list[tuple[Cell, ...]] = []
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for operator, (at, dims) in _SECTOR_SIZES.items():
        for name, steps in _SECTORS.items():
            ks = [k for step in steps for k in _members(step, dims)]
            rate = readings.middle([readings.gb_s(at(k)) for k in ks], f"the bandwidth at {name}")
            ours = _class_cost(readings, at, ks, name), rate
            found[operator, name] = ours
            wasted = 100 * (sum(fetched_over_used(ITEM_BYTES * k) for k in ks) / len(ks) - 1)
            theirs = figures.get(name, (None, None)) if at is gemm_by_k else (None, None)
            rows.append((operator, name, *ours, wasted, *theirs))
    (_, before), (sector, _), (other, after) = (found["GEMM 4096 x 4096 x K", name] for name in _SECTORS)
    held, absent = sector - 1 <= MAIN_CAUSE * (other - 1), max(sector, other) < ABSENT
    notes = (
        "fetched in vain: computed from the bytes of a row, not measured",
        *_served(readings, gemm_by_k, SECTOR_DIMS),
        *close("", max(sector, other), ABSENT),
        *(close("share of the cost", _share(sector, other), MAIN_CAUSE, write=percent) if other >= ABSENT else ()),
    )
    table = ("<operator", "<class", "cost|x", "measured|GB/s", "fetched in vain|%", "A100|GB/s", "A100 in vain|%")
    return Finding(table, rows, held, absent, _sector_words(sector, other, before, after), notes)


def _class_cost(readings: Readings, at: PointAt, ks: Sequence[int], name: str) -> float:
    """The median cost of a class; multiples of 16 are what the others are compared with."""
    if all(k % 16 == 0 for k in ks):
        return 1.0
    return readings.middle([_cost(readings, at, k) for k in ks], f"the cost of {name}")


def _cost(readings: Readings, at: PointAt, k: int) -> float | None:
    """Latency over the line between the multiples of 16 on both sides: nothing but alignment differs."""
    low = k - k % 16
    below, ours, above = (readings.ns(at(size)) for size in (low, k, low + 16))
    if below is None or ours is None or above is None:
        return None
    return ours / (below + (above - below) * (k - low) / 16)


def _share(sector: float, other: float) -> float:
    """Of what misaligned rows cost, the part that breaking the sector rule alone costs."""
    return (sector - 1) / (other - 1)


def _sector_words(sector: float, other: float, before: float, after: float) -> str:
    if max(sector, other) < ABSENT:
        return f"misaligned K cost nothing in a GEMM ({times(other, ABSENT)}), so there is no cause to look for"
    costs = f"breaking only the sector rule costs a GEMM {times(sector, ABSENT)}, misaligned K {times(other, ABSENT)}"
    if other < ABSENT:
        return costs
    return (
        f"{costs}: sectors are {percent(_share(sector, other), MAIN_CAUSE)} of the cost; bandwidth goes from "
        f"{before:,.0f} to {after:,.0f} GB/s (A100: 209 to 215)"
    )
