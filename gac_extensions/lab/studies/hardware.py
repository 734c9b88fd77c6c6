"""Studies of the hardware hypotheses H1, H2 and H4 (Tensor Core tiles, L2 sectors, loads) and of cuBLAS's kernels."""

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any

from gac.profiling.records import Point
from gac_extensions.lab.kernel_names import Kernel
from gac_extensions.lab.mechanisms.rules import SECTOR, VECTOR, row_alignment
from gac_extensions.lab.studies import published
from gac_extensions.lab.studies.misalignment import GEMV_DIMS
from gac_extensions.lab.studies.points import COPY, PointAt, along, copy_note, gemm_by_k, gemm_by_n, gemv_by_k
from gac_extensions.lab.studies.readings import (
    Readings,
    close,
    design,
    kernels_note,
    kind,
    most_common_kernel,
    percent,
    times,
)
from gac_extensions.lab.studies.records import Band, Cell, Finding, study

DIMS = range(100, 129)  # K of the published classes (105 to 128), and the class members between them

CLASSES = {"K % 16 == 0": 16, "K % 16 == 8": 8, "K % 8 == 4": 4, "K % 4 == 2": 2, "odd K": 1}
"""Alignment classes, by the largest power of two up to 16 that divides K."""

ITEM_BYTES = 2


def _members(step: int, dims: Sequence[int]) -> list[int]:
    return [dim for dim in dims if min(dim & -dim, 16) == step]


def _medians(
    readings: Readings, figure: Callable[[Point], float | None], point: PointAt, dims: Sequence[int], name: str
) -> dict[str, float]:
    return {
        label: readings.median([figure(point(k)) for k in _members(step, dims)], name.format(label))
        for label, step in CLASSES.items()
    }


def _classes_note(readings: Readings, point: PointAt, dims: Sequence[int]) -> tuple[str, ...]:
    """The kernels that serve each class: a loss between different kernels is not alignment's alone."""
    return kernels_note(readings, {name: map(point, _members(step, dims)) for name, step in CLASSES.items()})


tile_by_k = along("linear", "k", m=8192, n=8192)  # the published GEMM 8192 x 8192 x K


@study("tensor-core", lambda: map(tile_by_k, DIMS))
def tensor_core(readings: Readings, least: float, most: float, eight: float, absent: float) -> Finding:
    """Judge shares of the throughput; a time that does not depend on K at all already loses 12 % at odd K."""
    classes = ("K % 16 == 0", "K % 16 == 8", "K % 8 == 4", "odd K")  # as the published table lists them
    figures = dict(zip(classes, (row.tflops for row in published.rows("a100_gemm", study="C23")), strict=True))
    ours = _medians(readings, readings.tflops, tile_by_k, DIMS, "the throughput of {}")
    lost = {name: 1 - value / ours["K % 16 == 0"] for name, value in ours.items()}
    odd, half = lost["odd K"], lost["K % 16 == 8"]
    texts = {"odd_lost": percent(odd, absent, least, most), "half_lost": percent(half, eight)}
    return Finding(
        [(name, value, 100 * lost[name], figures.get(name)) for name, value in ours.items()],
        as_published=least <= odd <= most and half >= eight,
        absent=odd < absent,
        values=texts | {"full": ours["K % 16 == 0"], "odd": ours["odd K"], "half": ours["K % 16 == 8"]},
        notes=(
            *_classes_note(readings, tile_by_k, DIMS),
            *close("odd K lose", odd, absent, least, most, write=percent),
            *close("K % 16 == 8 loses", half, eight, write=percent),
        ),
    )


@study("vector-width", lambda: [*map(gemm_by_k, DIMS), *map(gemv_by_k, GEMV_DIMS), COPY])
def vector_width(readings: Readings, **band: Any) -> Finding:
    figures = {row.case: row.tflops for row in published.rows("a100_hypotheses", hypothesis="H4")}
    tflops = _medians(readings, readings.tflops, gemm_by_k, DIMS, "the throughput of {}")
    gemm_gb_s = _medians(readings, readings.gb_s, gemm_by_k, DIMS, "the bandwidth of a class")
    gemv_gb_s = _medians(readings, readings.gb_s, gemv_by_k, GEMV_DIMS, "the bandwidth of a class")
    measured = (tflops, gemm_gb_s, gemv_gb_s)
    lost, gemv_lost = (1 - rates["odd K"] / rates["K % 16 == 0"] for rates in (tflops, gemv_gb_s))
    return Band(**band, write=percent).finding(
        lost,
        [
            (name, row_alignment(ITEM_BYTES * step, VECTOR), *(rates[name] for rates in measured), figures.get(name))
            for name, step in CLASSES.items()
        ],
        "load: the widest that the alignment of rows allows, not measured; GB/s: the fewest bytes to move, a second",
        *copy_note(readings),
        gemv_lost=percent(gemv_lost),
        gemm_kernel=_odd_kernel(readings, gemm_by_k, DIMS),
        gemv_kernel=_odd_kernel(readings, gemv_by_k, GEMV_DIMS),
    )


def _odd_kernel(readings: Readings, point: PointAt, dims: Sequence[int]) -> str:
    odd, aligned = (most_common_kernel(readings, map(point, _members(step, dims))) for step in (1, 16))
    if odd is None or aligned is None:
        return "kernels not recorded"
    if kind(odd[0]) == kind(aligned[0]):
        return f"the same kernel: {design(odd[0])}"
    return f"another kernel: {design(odd[0])} instead of {design(aligned[0])}"


# --- L2 sectors ---

SECTOR_DIMS = range(96, 161)

_SECTORS: Mapping[str, tuple[int, ...]] = {"K % 16 == 0": (16,), "K % 16 == 8": (8,), "K % 8 != 0": (4, 2, 1)}
"""Rows of whole sectors; rows that break only the sector rule; rows that break the 16-byte rule too."""

_SECTOR_SIZES: Mapping[str, tuple[PointAt, range]] = {
    "GEMM 4096 x 4096 x K": (gemm_by_k, SECTOR_DIMS),
    "GEMV 1 x 4096 x K": (gemv_by_k, GEMV_DIMS),
}


@study("l2-sector", lambda: [point(k) for point, dims in _SECTOR_SIZES.values() for k in dims])
def l2_sector(readings: Readings, share: float, absent: float) -> Finding:
    hypothesis = published.rows("a100_hypotheses", hypothesis="H2")
    figures = {row.case: (row.gb_s, row.wasted_percent) for row in hypothesis}
    rows: list[tuple[Cell, ...]] = []
    measured: dict[tuple[PointAt, str], tuple[float, float]] = {}
    for operator, (point, dims) in _SECTOR_SIZES.items():
        for name, steps in _SECTORS.items():
            ks = [k for step in steps for k in _members(step, dims)]
            rate = readings.median([readings.gb_s(point(k)) for k in ks], f"the bandwidth at {name}")
            costs = [1.0] if steps == (16,) else [_cost(readings, point, k) for k in ks]
            measured[point, name] = readings.median(costs, f"the cost of {name}"), rate
            wasted = 100 * (sum(fetched_over_used(ITEM_BYTES * k) for k in ks) / len(ks) - 1)
            theirs = figures.get(name, (None, None)) if point is gemm_by_k else (None, None)
            rows.append((operator, name, *measured[point, name], wasted, *theirs))
    (_, before), (sector, _), (other, after) = (measured[gemm_by_k, name] for name in _SECTORS)
    misaligned, edges = times(other, absent), close("", max(sector, other), absent)
    sentence = f"breaking only the sector rule costs a GEMM {times(sector, absent)}, misaligned K {misaligned}"
    if max(sector, other) < absent:
        sentence = f"misaligned K cost nothing in a GEMM ({misaligned}), so there is no cause to look for"
    if other >= absent:
        part = (sector - 1) / (other - 1)
        edges += close("share of the cost", part, share, write=percent)
        rates = f"{before:,.0f} to {after:,.0f} GB/s (A100: 209 to 215)"
        sentence += f": sectors are {percent(part, share)} of the cost; bandwidth goes from {rates}"
    return Finding(
        rows,
        as_published=sector - 1 <= share * (other - 1),
        absent=max(sector, other) < absent,
        values={"text": sentence},
        notes=(
            "fetched in vain: computed from the bytes of a row, not measured",
            *_classes_note(readings, gemm_by_k, SECTOR_DIMS),
            *edges,
        ),
    )


def fetched_over_used(row_bytes: int) -> float:
    """Bytes of the sectors touched over bytes used, where rows are read separately; mean over the rows."""
    starts = range(0, SECTOR, gcd(row_bytes, SECTOR))
    sectors = sum(-(-(start + row_bytes) // SECTOR) for start in starts) / len(starts)
    return SECTOR * sectors / row_bytes


def _cost(readings: Readings, point: PointAt, k: int) -> float | None:
    """Latency over the line between the multiples of 16 on both sides: nothing but alignment differs."""
    low = k - k % 16
    below, latency, above = (readings.ns(point(size)) for size in (low, k, low + 16))
    if below is None or latency is None or above is None:
        return None
    return latency / (below + (above - below) * (k - low) / 16)


# --- cuBLAS's kernels ---

_TIER_AXES: Mapping[str, tuple[PointAt, range]] = {
    "K": (gemm_by_k, range(96, 129)),
    "N": (gemm_by_n, range(1000, 1033)),
}
_A100_KERNELS = {"align8": (80, 8), "align2": (80, 2), "align1": (75, 1)}
"""Architecture and alignment of the kernels that serve each tier there."""


def _tier_points(tier: str | None = None, *axes: str) -> list[Point]:
    """List the points along these axes (by default all) whose dim is of this tier (None: any)."""
    return [
        point(dim)
        for point, dims in (_TIER_AXES[axis] for axis in axes or _TIER_AXES)
        for dim in dims
        if tier in (None, "align1" if dim % 2 else "align2" if dim % 8 else "align8")
    ]


@study("kernel-tiers", _tier_points)
def kernel_tiers(readings: Readings) -> Finding:
    readings.require_kernels(_tier_points())
    rows: list[tuple[Cell, ...]] = []
    kernels: dict[tuple[str, str], Kernel] = {}
    axes: dict[str, list[str]] = {}
    for axis in _TIER_AXES:
        texts = []
        for row in published.rows("a100_kernel_tiers"):
            served = most_common_kernel(readings, _tier_points(row.tier, axis))
            readings.median([None if served is None else served[1]], f"the kernels of {row.tier} along {axis}")
            assert served is not None
            kernels[axis, row.tier] = served[0]
            texts.append(f"{row.condition.removeprefix('dim ')} by {design(served[0])}")
            rows.append((axis, row.condition, design(served[0]), 100 * served[1], row.kernel_family))
        axes.setdefault(", ".join(texts), []).append(axis)
    by_axis = [[kind(kernels[axis, tier]) for tier in _A100_KERNELS] for axis in _TIER_AXES]
    same = all(
        (kernel.family == "cutlass") == (tier != "align8") and (kernel.architecture, kernel.tier) == _A100_KERNELS[tier]
        for (_, tier), kernel in kernels.items()
    )
    examples = ", ".join(dict.fromkeys(kernel.label for kernel in kernels.values()))
    return Finding(
        rows,
        as_published=same and all(len({*kinds}) == len(kinds) for kinds in by_axis),
        absent=not any(align8 != align1 for align8, _, align1 in by_axis),
        values={"text": "; ".join(f"{' and '.join(names)}: {text}" for text, names in axes.items())},
        notes=("% 2 == 0: the even dims that are no multiple of 8", f"kernels, for example: {examples}"),
    )
