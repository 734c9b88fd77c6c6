"""Studies of heads of different dims, of dim 132 instead of 128, and of INT4 weights by batch."""

from collections.abc import Iterator, Sequence
from itertools import product, takewhile
from typing import Any

from gac.profiling.operators import operation
from gac.profiling.records import Point
from gac_extensions.lab.studies import published
from gac_extensions.lab.studies.points import COPY, copy_note, gemm, sdpa
from gac_extensions.lab.studies.readings import Readings, close, known, percent, quotient, times
from gac_extensions.lab.studies.records import Cell, Finding, study

# --- heads of different dims ---

ALIGNED = (128, 120)  # dims of equal heads: a little more work than the published dims, and as much work
SETTINGS = tuple(product((8, 32), (1, 2048)))  # heads and rows
_DIMS = published.palu("unique_dims")


def _heads(way: str, heads: int, m: int, dim: int | None = None) -> Point:
    """Return the product of equal heads, or of heads of the published dims, which are from the least to the largest."""
    low, high = (dim, dim) if dim is not None else (_DIMS[0], _DIMS[-1])
    return Point(operation(f"batched_gemm_{way}", m=m, k=4096, heads=heads, low=low, high=high), "fp16")


def _heads_points() -> Iterator[Point]:
    for setting in SETTINGS:
        yield from (_heads(way, *setting) for way in ("separate", "bucketed", "padded"))
        yield from (_heads("separate", *setting, dim) for dim in ALIGNED)


@study("heterogeneous-heads", _heads_points)
def heterogeneous_heads(readings: Readings, slower: float, absent: float) -> Finding:
    costs = {}
    for dim in ALIGNED:
        pairs = [(_heads("separate", *setting), _heads("separate", *setting, dim)) for setting in SETTINGS]
        costs[dim] = known(readings.ratio(*pair) for pair in pairs)
        readings.median(costs[dim], f"the cost of misaligned heads over heads of {dim}")
    least, most = (pick(map(pick, costs.values())) for pick in (min, max))
    pairs = [(_heads("separate", *setting, ALIGNED[0]), _heads("padded", *setting)) for setting in SETTINGS]
    notes = ["no latency of this comparison is published"]
    if launching := known(readings.ratio(*pair) for pair in pairs):
        ours = f"heads all of {ALIGNED[0]} take {_range(launching)} as long as heads padded to {ALIGNED[0]}"
        notes.insert(0, f"what launching heads one by one costs besides: {ours} in one launch")
    texts = (f"{_range(ratios, slower, absent)} as long as heads all of {dim}" for dim, ratios in costs.items())
    return Finding(
        [row for setting in SETTINGS for row in _heads_rows(readings, *setting)],
        as_published=least >= slower,
        absent=most < absent,
        values={"costs": " and ".join(texts)},
        notes=(*notes, *close("the least cost", least, slower), *close("the highest cost", most, absent)),
    )


def _range(ratios: Sequence[float], *edges: float) -> str:
    return f"{times(min(ratios), *edges)} to {times(max(ratios), *edges)}"


def _heads_rows(readings: Readings, heads: int, m: int) -> Iterator[tuple[Cell, ...]]:
    padded, mixed = _heads("padded", heads, m), f"{_DIMS[0]} to {_DIMS[-1]}"
    equal = {f"all {dim}": _heads("separate", heads, m, dim) for dim in ALIGNED}
    for text, point in {mixed: _heads("separate", heads, m), **equal}.items():
        ratios = (readings.ratio(point, other) for other in equal.values())
        yield heads, m, "one by one", text, readings.us(point), *ratios, readings.ratio(point, padded)
    for way in ("bucketed", "padded"):
        point = _heads(way, heads, m)
        yield heads, m, way, mixed, readings.us(point), *[None] * len(equal), readings.ratio(point, padded)


# --- head_dim 132 instead of 128 ---


def _layer(d: int) -> dict[str, Point]:
    """Attention and the four GEMMs of a layer of 32 heads of dim d, 8192 rows (B=4 S=2048), bf16."""
    rows, hidden = 8192, 32 * d
    return {
        "attention": sdpa(d, causal=True, dtype="bf16"),
        "qkv": gemm(rows, hidden, 3 * hidden, "bf16"),
        "o": gemm(rows, hidden, hidden, "bf16"),
        "mlp up": gemm(rows, hidden, 4 * hidden, "bf16"),
        "mlp down": gemm(rows, 4 * hidden, hidden, "bf16"),
    }


@study("head-dim-132", lambda: [point for d in (128, 132) for point in _layer(d).values()])
def head_dim_132(readings: Readings, lower: float, same: float) -> Finding:
    figures = {row.head_dim: row.tflops for row in published.rows("megatron_head_dim")}
    rows: list[tuple[Any, ...]] = []
    for name in _layer(128):
        at_128, at_132 = (readings.tflops(_layer(d)[name]) for d in (128, 132))
        rows.append((name, at_128, at_132, quotient(at_132, at_128), None, None))
    at_128, at_132 = (readings.tflops(*_layer(d).values()) for d in (128, 132))
    rows.append(("layer", at_128, at_132, quotient(at_132, at_128), figures[128], figures[132]))
    layer = readings.median([rows[-1][3]], "the throughput of the layer")
    attention = readings.median([rows[0][3]], "the throughput of attention")
    return Finding(
        rows,
        as_published=layer <= lower,
        absent=min(layer, attention) >= same,
        values={"layer": percent(layer, lower, same), "attention": percent(attention, same)},
        notes=(
            "measured: the forward pass of one layer; published: training of a whole model",
            *close("the layer reaches", layer, lower, same, write=percent),
            *close("attention reaches", attention, same, write=percent),
        ),
    )


# --- INT4 weights ---

BATCHES = (1, 2, 4, 8, 16, 32)
PROJECTIONS = {"mlp_gate_up": (8960, 1536), "attn_q_o": (1536, 1536)}  # n and k
PUBLISHED_LAST = {"mlp_gate_up": 1, "attn_q_o": 0}
"""The last batch at which the fused kernel beat the FP16 GEMM; 0: none."""


def _int4(projection: str, batch: int, operator: str = "int4_linear") -> Point:
    n, k = PROJECTIONS[projection]
    if operator == "linear":
        return gemm(batch, k, n, "bf16")
    return Point(operation(operator, m=batch, k=k, n=n, group=128), "bf16")


_INT4_KINDS = ("int4_linear", "int4_linear_dequantised", "linear")


@study("int4-regimes", lambda: [*(_int4(*setting) for setting in product(PROJECTIONS, BATCHES, _INT4_KINDS)), COPY])
def int4_regimes(readings: Readings, win: float) -> Finding:
    last, near_edges = dict[str, int](), list[str]()
    for projection in PROJECTIONS:
        readings.median([readings.ns(_int4(projection, batch)) for batch in BATCHES], "the fused kernel's latency")
        ratios = [readings.ratio(_int4(projection, batch, "linear"), _int4(projection, batch)) for batch in BATCHES]
        advantages = list(zip(BATCHES, ratios, strict=True))
        wins = list(takewhile(lambda pair: (pair[1] or 0) >= win, advantages))  # from one row on, at every batch
        last[projection] = wins[-1][0] if wins else 0
        for batch, advantage in (*wins[-1:], *advantages[len(wins) : len(wins) + 1]):
            if advantage is not None:
                near_edges += close(f"{projection} at batch {batch}", advantage, win)
    texts = (f"{_won(last[name])} on {name} (RTX 4070: {_won(theirs)})" for name, theirs in PUBLISHED_LAST.items())
    settings = product(PROJECTIONS, BATCHES)
    rate, projection, batch = max((readings.gb_s(_int4(*setting)) or 0.0, *setting) for setting in settings)
    copied = readings.gb_s(COPY)
    share = "" if copied is None else percent(rate / copied)
    best = f"; the fused kernel at best {rate:,.0f} GB/s ({projection}, batch {batch}: {share})"
    return Finding(
        [_int4_row(readings, row) for row in published.rows("int4_gemv_regimes")],
        as_published=last == PUBLISHED_LAST,
        absent=not any(last.values()),
        values={"wins": ", ".join(texts)},
        notes=(
            "x: latency over that of the fused kernel; GEMM: of bf16 weights",
            "the RTX 4070's GB/s count the weights once a row of the batch, the measured ones once",
            *copy_note(readings, best),
            *near_edges,
        ),
    )


def _int4_row(readings: Readings, row: Any) -> tuple[Cell, ...]:
    points = fused, *others = [_int4(row.projection, row.batch, kind) for kind in _INT4_KINDS]
    return (
        row.projection,
        row.batch,
        *map(readings.us, points),
        *(readings.ratio(point, fused) for point in others),
        readings.gb_s(fused),
        row.speedup_vs_two_op,
        row.speedup_vs_fp16_gemm,
        row.fused_gb_s,
    )


def _won(last: int) -> str:
    return f"up to batch {last}" if last else "at no batch"
