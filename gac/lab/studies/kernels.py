"""Studies of the kernels themselves: cuBLAS's alignment tiers and FlashAttention's templates."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any

from gac.lab.mechanisms.flash import AttentionTile, widest_tile
from gac.lab.studies import published
from gac.lab.studies.gemms import gemm_by_n
from gac.lab.studies.readings import Readings, known, quotient
from gac.lab.studies.records import Cell, Finding, close, study, times
from gac.lab.studies.served import kind, serving, words
from gac.lab.studies.shapes import PointAt, gemm_by_k, sdpa
from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.records import Point

_AXES: Mapping[str, tuple[PointAt, Sequence[int]]] = MappingProxyType(
    {"K": (gemm_by_k, range(96, 129)), "N": (gemm_by_n, range(1000, 1033))}
)

_A100_KERNELS = MappingProxyType({"align8": (80, 8), "align2": (80, 2), "align1": (75, 1)})
"""Architecture and alignment of the kernels that serve each tier there."""


def _tier_of(dim: int) -> str:
    return "align1" if dim % 2 else "align2" if dim % 8 else "align8"


def _tier_points() -> tuple[Point, ...]:
    return tuple(at(dim) for at, dims in _AXES.values() for dim in dims)


def _most_common(readings: Readings, axis: str, tier: str) -> tuple[Kernel, float]:
    """The kind of kernel (family, architecture, tier) that serves most of a tier's dims, and its share."""
    at, dims = _AXES[axis]
    found = serving(readings, (at(dim) for dim in dims if _tier_of(dim) == tier))
    readings.middle([None if found is None else found[1]], f"the kernels of {tier} along {axis}")
    assert found is not None
    return found


@study(
    "kernel-tiers",
    "which cuBLAS kernel serves which alignment",
    "dim % 8 == 0 runs cuBLAS's own sm80 kernels, even dims CUTLASS sm80 align2, odd dims CUTLASS sm75 align1",
    "arXiv 2604.09595, section 3.2, A100-80GB, read with Nsight Compute",
    "rule: by the names of the kernels that served most dims; held where the three tiers are those of the A100, other "
    "where aligned and odd dims have different kernels, did not hold where one kernel serves both",
    _tier_points,
)
def kernel_tiers(readings: Readings) -> Finding:
    readings.require_kernels(_tier_points())
    rows: list[tuple[Cell, ...]] = []
    kinds: dict[tuple[str, str], Kernel] = {}
    for axis in _AXES:
        for row in published.rows("a100_kernel_tiers"):
            kernel, share = _most_common(readings, axis, row.tier)
            kinds[axis, row.tier] = kernel
            rows.append((axis, row.condition, words(kernel), 100 * share, row.kernel_family))
    separate = all(len({kind(kinds[axis, tier]) for tier in _A100_KERNELS}) == 3 for axis in _AXES)
    same = all(_as_published(kernel, tier) for (_, tier), kernel in kinds.items())
    split = any(kind(kinds[axis, "align8"]) != kind(kinds[axis, "align1"]) for axis in _AXES)
    examples = ", ".join(dict.fromkeys(kernel.label for kernel in kinds.values()))
    notes = ("% 2 == 0: the even dims that are no multiple of 8", f"kernels, for example: {examples}")
    table = ("<axis", "<condition", "<served by", "of its dims|%", "<A100")
    return Finding(table, rows, same and separate, not split, _tiers_said(kinds), notes)


def _tiers_said(kinds: Mapping[tuple[str, str], Kernel]) -> str:
    """Which kernels serve which dims; axes that the same kernels serve are named together."""
    conditions = {row.tier: row.condition.removeprefix("dim ") for row in published.rows("a100_kernel_tiers")}
    axes: dict[str, list[str]] = {}
    for axis in _AXES:
        text = ", ".join(f"{condition} by {words(kinds[axis, tier])}" for tier, condition in conditions.items())
        axes.setdefault(text, []).append(axis)
    return "; ".join(f"{' and '.join(names)}: {text}" for text, names in axes.items())


def _as_published(kernel: Kernel, tier: str) -> bool:
    family = (kernel.family == "cutlass") == (tier != "align8")
    return family and (kernel.architecture, kernel.tier) == _A100_KERNELS[tier]


STEP = 1.05
"""Latency rises at a template's edge by at least this much more than in proportion to head_dim."""

A100_SHARED = 163 * 1024
"""Bytes of shared memory of a thread block at compute capability 8.0 (CUDA C++ Programming Guide)."""

_EDGES = (64, 96, 128, 160)
_STAIRS = range(8, 257, 8)
_MISALIGNED = range(112, 122)


def _flash(d: int) -> Point:
    return sdpa(d, "flash")


@study(
    "fa-templates",
    "FlashAttention-2 templates: tile model against the measured staircase",
    "latency is a staircase in head_dim with steps past 64, 96, 128 and 160, where the next template's tile is smaller",
    "arXiv 2604.09595, section 3.1, A100-80GB, B=4 S=2048 H=32 fp16",
    f"rule: at each of the four edges the latency of the next multiple of 8 rises at least {STEP:.2f}x more than "
    "head_dim does; held with all four steps, other with some, did not hold with none",
    lambda: (*(_flash(d) for d in _STAIRS), *(_flash(d) for d in _MISALIGNED)),
)
def fa_templates(readings: Readings) -> Finding:
    rows = (_template_row(readings, row) for row in published.rows("a100_fa2_templates"))
    steps = {edge: _excess(readings, edge) for edge in _EDGES}
    readings.middle(steps.values(), "the staircase of the flash backend")
    found = [edge for edge, rise in steps.items() if rise is not None and rise >= STEP]
    rises = {edge: rise for edge, rise in steps.items() if rise is not None}
    grown = ", ".join(f"{times(rise, STEP)} past {edge}" for edge, rise in rises.items())
    missing = [str(edge) for edge, rise in rises.items() if rise < STEP]
    said = f"over growth in proportion to head_dim, latency is {grown}"
    said += f": no step past {', '.join(missing)}" if missing else ""
    tiles = ("<templates, tiles that ran", "<tile model of sm_80", "<A100 tile")
    table = ("<head_dim", "first|ms", "last|ms", *tiles, "A100|ms")
    notes = (
        *_shared_note(readings),
        *_misaligned_note(readings),
        *(text for edge, rise in rises.items() for text in close(f"past {edge}", rise, STEP)),
    )
    return Finding(table, rows, len(found) == len(_EDGES), not found, said, notes)


def _template_row(readings: Readings, row: Any) -> tuple[Cell, ...]:
    dims = [d for d in _STAIRS if row.low_exclusive < d <= row.high_inclusive]
    model = dict.fromkeys(f"{tile.rows}x{tile.cols}" for tile in (widest_tile(d, A100_SHARED) for d in dims))
    ran = (f"{template}: {tile[0]}x{tile[1]}" for d in dims for template, tile, _ in _ran(readings, d))
    return (
        f"{dims[0]} to {dims[-1]}",
        readings.ms(_flash(dims[0])),
        readings.ms(_flash(dims[-1])),
        ", ".join(dict.fromkeys(ran)) or None,
        ", ".join(model),
        f"{row.block_rows}x{row.block_cols}",
        row.latency_ms,
    )


def _ran(readings: Readings, d: int) -> Iterator[tuple[int, tuple[int, int], int]]:
    """Template, tile and shared memory of the attention kernels that ran at a head_dim."""
    for launch in readings.launches(_flash(d)):
        kernel = describe(launch.name)
        if kernel.template_d is not None and kernel.tile is not None:
            yield kernel.template_d, kernel.tile, launch.shared_bytes


def _excess(readings: Readings, edge: int) -> float | None:
    """Rise of the latency from a template's last multiple of 8 to the next one, over the rise of head_dim."""
    ratio = readings.ratio(_flash(edge + 8), _flash(edge))
    return None if ratio is None else ratio * edge / (edge + 8)


def _shared_note(readings: Readings) -> tuple[str, ...]:
    """Whether the tile model's bytes of Q, K and V are the shared memory that the kernels asked for."""
    found = {template: (tile, asked) for d in _STAIRS for template, tile, asked in _ran(readings, d)}
    texts = [
        f"{template}: {asked / 1024:.0f} ({AttentionTile(template, *tile).shared / 1024:.0f})"
        for template, (tile, asked) in found.items()
    ]
    said = "shared memory in KiB by template, in parentheses the model's Q, K and V"
    return (f"{said}: {', '.join(texts)}",) if texts else ()


def _misaligned_note(readings: Readings) -> tuple[str, ...]:
    """What experiment C21 saw at 112 to 121."""
    figures = published.sdpa_ms("C21")
    odd = [d for d in _MISALIGNED if d % 8]
    ours = readings.middle((readings.ratio(_flash(d), _flash(112)) for d in odd), "flash at misaligned head dims")
    theirs = median(known(quotient(figures[d], figures[112]) for d in odd))
    return (f"113 to 121 that are no multiple of 8 take {ours:.2f}x as long as 112 (A100: {theirs:.2f}x)",)
