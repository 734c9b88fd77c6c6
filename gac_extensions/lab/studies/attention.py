"""Studies of attention: its backends, its bandwidth, and FlashAttention-2's templates."""

from collections.abc import Iterator, Mapping
from itertools import product, starmap
from statistics import median
from typing import Any

from gac.profiling.records import Point
from gac_extensions.lab.kernel_names import describe
from gac_extensions.lab.mechanisms.rules import template_for
from gac_extensions.lab.studies import published
from gac_extensions.lab.studies.misalignment import head_dim_groups
from gac_extensions.lab.studies.points import sdpa
from gac_extensions.lab.studies.readings import Readings, close, kernels_note, known, percent, quotient, times
from gac_extensions.lab.studies.records import Band, Cell, Finding, study

BACKENDS = ("auto", "flash", "mem_efficient", "math", "cudnn")


def _backend_point(d: int, backend: str) -> Point:
    return sdpa(d, "efficient" if backend == "mem_efficient" else backend)


def _backend_figures() -> dict[tuple[int, str], float | None]:
    return {(row.head_dim, row.backend): row.latency_ms for row in published.rows("a100_sdpa", study="S2")}


def _backend_dims() -> list[int]:
    return sorted({d for d, _ in _backend_figures()})


@study("sdpa-backends", lambda: starmap(_backend_point, product(_backend_dims(), BACKENDS)))
def sdpa_backends(readings: Readings, same: float, slower: float) -> Finding:
    """Judge by latency which backend PyTorch chose: the one that is as fast as the automatic choice."""
    figures, dims = _backend_figures(), _backend_dims()
    rows: list[tuple[Cell, ...]] = []
    for d, backend in product(dims, BACKENDS):
        measured, figure = readings.ms(_backend_point(d, backend)), figures.get((d, backend))
        theirs = "refused" if figure is None and backend != "cudnn" else figure
        rows.append((d, backend, "refused" if measured is None else measured, theirs))
    near_edges, as_fast = list[str](), dict[str, list[str]]()
    for d in dims:
        ratios = {name: readings.ratio(sdpa(d), _backend_point(d, name)) for name in BACKENDS[1:]}
        names = [name for name, ratio in ratios.items() if ratio is not None and abs(ratio - 1) <= same]
        as_fast.setdefault(" or ".join(names) or "none of them", []).append(str(d))
        if (over_flash := ratios["flash"]) is not None:
            near_edges += close(f"automatic over flash at {d}", over_flash, 1 - same, 1 + same)
    flash = all("flash" in names.split() for names in as_fast)
    chosen = " and as ".join(f"{names} at {' '.join(served)}" for names, served in as_fast.items())
    refused = readings.ns(sdpa(107, "efficient")) is None
    math = readings.median([readings.ratio(sdpa(d, "math"), sdpa(d)) for d in dims], "how slow the math backend is")
    return Finding(
        rows,
        as_published=flash and refused and math >= slower,
        absent=not (refused or math >= slower),
        values={
            "chosen": "flash at every head_dim" if flash else chosen,
            "answer": "refuses" if refused else "takes",
            "math": math,
            "theirs": median(known(quotient(figures[d, "math"], figures[d, "auto"]) for d in dims)),
        },
        notes=(*near_edges, *close("math", math, slower)),
    )


BANDWIDTH_DIMS = range(64, 129)


@study("sdpa-bandwidth", lambda: map(sdpa, BANDWIDTH_DIMS))
def sdpa_bandwidth(readings: Readings, **band: Any) -> Finding:
    hypothesis = published.rows("a100_hypotheses", hypothesis="H3")
    figures = {row.head_dim: row.gb_s for row in hypothesis if row.head_dim is not None}
    measured = {d: readings.gb_s(sdpa(d)) for d in BANDWIDTH_DIMS}
    theirs = known(_lost_percent(figures, d) for d in figures)
    lost = readings.median([_lost_percent(measured, d) for d in measured], "the bandwidth lost by misaligned head dims")
    return Band(**band, write=percent).finding(
        lost / 100,
        [
            (d, measured[d], _lost_percent(measured, d), figures.get(d), _lost_percent(figures, d))
            for d in sorted({*figures, 64, 96, 104, 107, 128})
        ],
        *kernels_note(readings, head_dim_groups(BANDWIDTH_DIMS)),
        low=min(theirs),
        high=max(theirs),
    )


def _lost_percent(gb_s: Mapping[int, float | None], d: int) -> float | None:
    ratio = quotient(gb_s.get(d), gb_s.get(d - d % 8))
    return None if d % 8 == 0 or ratio is None else 100 * (1 - ratio)


# --- templates of FlashAttention-2 ---

A100_SHARED = 163 * 1024
"""Bytes of shared memory of a thread block at compute capability 8.0 (CUDA C++ Programming Guide)."""

_EDGES = (64, 96, 128, 160)
_STAIRS = range(8, 257, 8)
_MISALIGNED = range(112, 122)


def _flash(d: int) -> Point:
    return sdpa(d, "flash")


def shared_bytes(template: int, rows: int, columns: int) -> int:
    """Return the bytes of Q, K and V (2 each) in shared memory, for a tile of query rows and key columns."""
    return 2 * template * (rows + 2 * columns)


def model_tile(head_dim: int, limit: int = A100_SHARED) -> tuple[int, int]:
    """Return the study's tile: most key columns for which all five operands of a template's step fit ``limit`` bytes.

    The fp32 scores and accumulator are charged to the same budget, though they lie in registers; that reproduces the
    published table (FlashAttention-2, arXiv 2307.08691, section 3.3, tunes block sizes against both limits).
    """
    template, rows = template_for(head_dim), 128
    assert template is not None, "no template serves a head_dim above 256"
    for columns in (128, 64):
        if shared_bytes(template, rows, columns) + 4 * rows * (columns + template) <= limit:
            return rows, columns
    return rows, 32


@study("fa-templates", lambda: map(_flash, (*_STAIRS, *_MISALIGNED)))
def fa_templates(readings: Readings, step: float) -> Finding:
    ratios = {edge: readings.ratio(_flash(edge + 8), _flash(edge)) for edge in _EDGES}
    rises = {edge: ratio * edge / (edge + 8) for edge, ratio in ratios.items() if ratio is not None}
    readings.median(rises.values(), "the staircase of the flash backend")
    missing = [str(edge) for edge, rise in rises.items() if rise < step]
    figures = published.sdpa_ms("C21")
    odd = [d for d in _MISALIGNED if d % 8]
    ours = readings.median((readings.ratio(_flash(d), _flash(112)) for d in odd), "flash at misaligned head dims")
    theirs = median(known(quotient(figures[d], figures[112]) for d in odd))
    return Finding(
        [_template_row(readings, row) for row in published.rows("a100_fa2_templates")],
        as_published=len(rises) - len(missing) == len(_EDGES),
        absent=len(missing) == len(rises),
        values={
            "grown": ", ".join(f"{times(rise, step)} past {edge}" for edge, rise in rises.items()),
            "missing": f": no step past {', '.join(missing)}" if missing else "",
        },
        notes=(
            *_shared_note(readings),
            f"113 to 121 that are no multiple of 8 take {ours:.2f}x as long as 112 (A100: {theirs:.2f}x)",
            *(note for edge, rise in rises.items() for note in close(f"past {edge}", rise, step)),
        ),
    )


def _template_row(readings: Readings, row: Any) -> tuple[Cell, ...]:
    dims = [d for d in _STAIRS if row.low_exclusive < d <= row.high_inclusive]
    ran = (f"{template}: {rows}x{columns}" for d in dims for template, (rows, columns), _ in _ran(readings, d))
    modelled = (f"{rows}x{columns}" for rows, columns in map(model_tile, dims))
    return (
        f"{dims[0]} to {dims[-1]}",
        readings.ms(_flash(dims[0])),
        readings.ms(_flash(dims[-1])),
        ", ".join(dict.fromkeys(ran)) or None,
        ", ".join(dict.fromkeys(modelled)),
        f"{row.block_rows}x{row.block_cols}",
        row.latency_ms,
    )


def _ran(readings: Readings, d: int) -> Iterator[tuple[int, tuple[int, int], int]]:
    for launch in readings.launches(_flash(d)):
        kernel = describe(launch.name)
        if kernel.template_d is not None and kernel.tile is not None:
            yield kernel.template_d, kernel.tile, launch.shared_bytes


def _shared_note(readings: Readings) -> tuple[str, ...]:
    tiles = {template: (tile, measured) for d in _STAIRS for template, tile, measured in _ran(readings, d)}
    texts = [
        f"{template}: {measured / 1024:.0f} ({shared_bytes(template, *tile) / 1024:.0f})"
        for template, (tile, measured) in tiles.items()
    ]
    note = f"shared memory in KiB by template, in parentheses the model's Q, K and V: {', '.join(texts)}"
    return (note,) if texts else ()
