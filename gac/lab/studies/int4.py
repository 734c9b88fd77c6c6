"""The study of INT4 weights by batch: the fused kernel against two steps and against the GEMM of 16-bit weights."""

from itertools import product, takewhile
from typing import Any

from gac.lab.studies import published
from gac.lab.studies.readings import Readings
from gac.lab.studies.records import NOISE, Cell, Finding, close, percent, study
from gac.lab.studies.shapes import copied_note, copy, gemm
from gac.profiling.operators import operation
from gac.profiling.records import Point

GROUP = 128
BATCHES = (1, 2, 4, 8, 16, 32)
SHAPES = {"mlp_gate_up": (8960, 1536), "attn_q_o": (1536, 1536)}
"""n and k."""

_KINDS = ("int4_linear", "int4_linear_dequantised", "linear")

WIN = 1 + NOISE
"""The GEMM takes at least this many times longer where the fused kernel beats it."""

PUBLISHED_LAST = {"mlp_gate_up": 1, "attn_q_o": 0}
"""The last batch at which the fused kernel beat the FP16 GEMM; 0: none."""


def _point(projection: str, batch: int, operator: str = "int4_linear") -> Point:
    """The fused kernel, or another operator, on one projection."""
    n, k = SHAPES[projection]
    if operator == "linear":
        return gemm(batch, k, n, "bf16")
    return Point(operation(operator, m=batch, k=k, n=n, group=GROUP), "bf16")


def _points() -> tuple[Point, ...]:
    timed = (_point(projection, batch, kind) for projection in SHAPES for batch in BATCHES for kind in _KINDS)
    return (*timed, copy())


def _last_win(readings: Readings, projection: str) -> int:
    """The last batch up to which the fused kernel beats the GEMM, beyond noise, at every batch; 0: not at one row."""
    return max(takewhile(lambda batch: (_advantage(readings, projection, batch) or 0) >= WIN, BATCHES), default=0)


def _advantage(readings: Readings, projection: str, batch: int) -> float | None:
    """How many times longer than the fused kernel the GEMM takes."""
    return readings.ratio(_point(projection, batch, "linear"), _point(projection, batch))


def _edges(readings: Readings, projection: str, last: int) -> tuple[str, ...]:
    """Notes for the last win and for the batch after it, where either is close."""
    following = [batch for batch in BATCHES if batch > last][:1]
    advantages = {batch: _advantage(readings, projection, batch) for batch in (*([last] if last else []), *following)}
    return tuple(
        text
        for batch, won in advantages.items()
        if won is not None
        for text in close(f"{projection} at batch {batch}", won, WIN)
    )


@study(
    "int4-regimes",
    "INT4 weights at batch 1 to 32: fused, two-op, 16-bit GEMM",
    "the fused kernel beats the FP16 GEMM at batch 1 only (2.38x on 8960 x 1536, never on 1536 x 1536)",
    "fused INT4 dequantise-GEMV, RTX 4070 Laptop, group 128, Qwen2.5-1.5B shapes",
    f"rule: the last batch up to which fused beats the GEMM, which takes at least {WIN:.2f}x as long; held where it is "
    "1 on 8960 x 1536 and none on 1536 x 1536, did not hold where fused beats the GEMM at one row on neither, other "
    "otherwise",
    _points,
)
def int4_regimes(readings: Readings) -> Finding:
    for projection in SHAPES:
        readings.middle([readings.ns(_point(projection, batch)) for batch in BATCHES], "the fused kernel's latency")
    rows = (_row(readings, row) for row in published.rows("int4_gemv_regimes"))
    last = {projection: _last_win(readings, projection) for projection in SHAPES}
    measured = ("fused|us", "two-op|us", "GEMM|us", "two-op|x", "GEMM|x", "fused|GB/s")
    theirs = ("RTX 4070 two-op|x", "RTX 4070 GEMM|x", "RTX 4070 fused|GB/s")
    said = ", ".join(
        f"{_won(last[projection])} on {projection} (RTX 4070: {_won(PUBLISHED_LAST[projection])})"
        for projection in SHAPES
    )
    edges = (text for projection in SHAPES for text in _edges(readings, projection, last[projection]))
    notes = ("x: latency over that of the fused kernel; GEMM: of bf16 weights", *_notes(readings), *edges)
    table = ("<projection", "batch", *measured, *theirs)
    held, absent = last == PUBLISHED_LAST, not any(last.values())
    return Finding(table, rows, held, absent, f"the fused kernel beats the GEMM {said}", notes)


def _row(readings: Readings, row: Any) -> tuple[Cell, ...]:
    fused, two_op, full = (_point(row.projection, row.batch, kind) for kind in _KINDS)
    return (
        row.projection,
        row.batch,
        *(readings.us(point) for point in (fused, two_op, full)),
        *(readings.ratio(point, fused) for point in (two_op, full)),
        readings.gb_s(fused),
        row.speedup_vs_two_op,
        row.speedup_vs_fp16_gemm,
        row.fused_gb_s,
    )


def _won(last: int) -> str:
    return f"up to batch {last}" if last else "at no batch"


def _notes(readings: Readings) -> tuple[str, ...]:
    copied = readings.gb_s(copy())
    rates = ((readings.gb_s(_point(*where)) or 0.0, *where) for where in product(SHAPES, BATCHES))
    rate, projection, batch = max(rates)
    share = "" if copied is None else f"{percent(rate / copied)}"
    best = f"; the fused kernel at best {rate:,.0f} GB/s ({projection}, batch {batch}: {share})"
    counting = "the RTX 4070's GB/s count the weights once a row of the batch, the measured ones once"
    return counting, *copied_note(readings, best)
