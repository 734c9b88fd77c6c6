"""Studies of heads: of different dims, and of dim 132 instead of 128."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from gac.lab.studies import published
from gac.lab.studies.readings import Readings, known, quotient
from gac.lab.studies.records import ABSENT, Cell, Finding, close, percent, study, times
from gac.lab.studies.shapes import gemm, sdpa
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.records import Point

ALIGNED = (128, 120)
"""Dims of the heads that are all alike: a little more work than the published dims, and as much work."""

WAYS = ("bucketed", "padded")
"""Ways without a launch a head."""

MISALIGNED_SLOWER = 1.25
"""Misaligned heads are at least this much slower than aligned ones (published: 25 % and more)."""


SETTINGS = tuple(product((8, 32), (1, 2048)))
"""Heads and rows."""


def _heads(way: str, heads: int, m: int, low: int, high: int) -> Point:
    """Heads of dims from ``low`` to ``high``."""
    return Point(operation(f"batched_gemm_{way}", m=m, k=4096, heads=heads, low=low, high=high), "fp16")


def _way(way: str, heads: int, m: int) -> Point:
    """Heads of the published dims."""
    dims = published.palu("unique_dims")
    return _heads(way, heads, m, dims[0], dims[-1])


def _alike(dim: int, heads: int, m: int) -> Point:
    """Heads of one dim, launched one by one."""
    return _heads("separate", heads, m, dim, dim)


def _heads_points() -> Iterator[Point]:
    for setting in SETTINGS:
        yield from (_way(way, *setting) for way in ("separate", *WAYS))
        yield from (_alike(dim, *setting) for dim in ALIGNED)


def _over_alike(readings: Readings, dim: int) -> list[float]:
    """What misaligned dims cost against heads all at ``dim``, one by one as well, in every setting."""
    ratios = [readings.ratio(_way("separate", *setting), _alike(dim, *setting)) for setting in SETTINGS]
    readings.middle(ratios, f"the cost of misaligned heads over heads of {dim}")
    return known(ratios)


@study(
    "heterogeneous-heads",
    "heads of different dims: what their misalignment costs; one by one, bucketed, padded",
    "PaLU's score gives heads dims of 114 to 125, 96.9 % of them no multiple of 8; misaligned dims cost 25-60 %",
    "GAC's study, PaLU on Llama-3-8B, keep 0.8; cuBLAS kernel tiers, A100-80GB",
    f"rule: heads one by one, as many GEMMs on both sides; held where those of 114 to 125 dims take at least "
    f"{MISALIGNED_SLOWER:.2f}x as long as those all of {ALIGNED[0]} and as those all of {ALIGNED[1]} in every setting, "
    f"did not hold where they never take {ABSENT:.2f}x, other otherwise; bucketed and padded are shown, not judged",
    lambda: tuple(_heads_points()),
)
def heterogeneous_heads(readings: Readings) -> Finding:
    costs = {dim: _over_alike(readings, dim) for dim in ALIGNED}
    least, most = (pick(value for ratios in costs.values() for value in ratios) for pick in (min, max))
    alike = (f"over all at {dim}|x" for dim in ALIGNED)
    table = ("heads", "rows", "<way", "<dims", "measured|us", *alike, "over padded|x")
    said = "one by one, heads of 114 to 125 dims take " + " and ".join(
        f"{_range(ratios, MISALIGNED_SLOWER, ABSENT)} as long as heads all of {dim}" for dim, ratios in costs.items()
    )
    notes = (
        *_launching_note(readings),
        "no latency of this comparison is published",
        *close("the least cost", least, MISALIGNED_SLOWER),
        *close("the highest cost", most, ABSENT),
    )
    rows = (row for setting in SETTINGS for row in _heads_rows(readings, *setting))
    return Finding(table, rows, least >= MISALIGNED_SLOWER, most < ABSENT, said, notes)


def _range(ratios: Sequence[float], *edges: float) -> str:
    return f"{times(min(ratios), *edges)} to {times(max(ratios), *edges)}"


def _heads_rows(readings: Readings, heads: int, m: int) -> Iterator[tuple[Cell, ...]]:
    """One row a way of one setting; only what is launched one by one is set against heads that are all alike."""
    padded, dims = _way("padded", heads, m), published.palu("unique_dims")
    alike = [_alike(dim, heads, m) for dim in ALIGNED]
    mixed = f"{dims[0]} to {dims[-1]}"
    one_by_one = [(mixed, _way("separate", heads, m)), *((f"all {dim}", _alike(dim, heads, m)) for dim in ALIGNED)]
    for text, point in one_by_one:
        over = (readings.ratio(point, other) for other in alike)
        yield heads, m, "one by one", text, readings.us(point), *over, readings.ratio(point, padded)
    for way in WAYS:
        point = _way(way, heads, m)
        yield heads, m, way, mixed, readings.us(point), *(None for _ in alike), readings.ratio(point, padded)


def _launching_note(readings: Readings) -> tuple[str, ...]:
    """What a launch a head costs besides misalignment."""
    ratios = known(readings.ratio(_alike(ALIGNED[0], *setting), _way("padded", *setting)) for setting in SETTINGS)
    said = f"what launching heads one by one costs besides: heads all of {ALIGNED[0]} take {{}} as long as heads padded"
    return (f"{said.format(_range(ratios))} to {ALIGNED[0]} in one launch",) if ratios else ()


ROWS = 8192
HEADS = 32

MUCH_LOWER = 0.75
"""132 has at most this share of the throughput of 128 (published: 0.59)."""

AS_HIGH = 0.95


def _layer(d: int) -> dict[str, Point]:
    """Attention and the four GEMMs of a layer of 32 heads of dim d, 8192 rows (B=4 S=2048), bf16."""
    hidden = HEADS * d
    return {
        "attention": sdpa(d, causal=True, dtype="bf16"),
        "qkv": gemm(ROWS, hidden, 3 * hidden, "bf16"),
        "o": gemm(ROWS, hidden, hidden, "bf16"),
        "mlp up": gemm(ROWS, hidden, 4 * hidden, "bf16"),
        "mlp down": gemm(ROWS, 4 * hidden, hidden, "bf16"),
    }


def _layer_tflops(readings: Readings, d: int) -> float | None:
    """FLOPs of the whole layer over the sum of its latencies."""
    points = _layer(d).values()
    latencies = known(map(readings.ns, points))
    flops = sum(OPERATORS.get(point.operation.operator).flops(point.operation.axes) for point in points)
    return flops / sum(latencies) / 1e3 if len(latencies) == len(points) else None


@study(
    "head-dim-132",
    "head_dim 132 instead of 128",
    "training reaches 370 TFLOP/s at head_dim 128 and 219 at 132",
    "Megatron, H100",
    f"rule: held where the layer reaches at most {percent(MUCH_LOWER)} of the throughput at 128, did not hold where "
    f"layer and attention both reach {percent(AS_HIGH)}, other otherwise",
    lambda: tuple(point for d in (128, 132) for point in _layer(d).values()),
)
def head_dim_132(readings: Readings) -> Finding:
    figures = {row.head_dim: row.tflops for row in published.rows("megatron_head_dim")}
    ours = {d: _layer_tflops(readings, d) for d in (128, 132)}
    rows: list[tuple[Any, ...]] = []
    for name in _layer(128):
        at_128, at_132 = (readings.tflops(_layer(d)[name]) for d in (128, 132))
        rows.append((name, at_128, at_132, quotient(at_132, at_128), None, None))
    whole = quotient(ours[132], ours[128])
    rows.append(("layer", ours[128], ours[132], whole, figures[128], figures[132]))
    layer = readings.middle([whole], "the throughput of the layer")
    attention = readings.middle([rows[0][3]], "the throughput of attention")
    absent = min(layer, attention) >= AS_HIGH
    theirs = (f"H100, train, at {d}|TFLOP/s" for d in (128, 132))
    table = ("<part", "at 128|TFLOP/s", "at 132|TFLOP/s", "132 over 128|x", *theirs)
    said = (
        f"at 132 a layer's forward pass reaches {percent(layer, MUCH_LOWER, AS_HIGH)} of the throughput at 128 "
        f"(training, H100: 59 %), its attention {percent(attention, AS_HIGH)}"
    )
    notes = (
        "measured: the forward pass of one layer; published: training of a whole model",
        *close("the layer reaches", layer, MUCH_LOWER, AS_HIGH, write=percent),
        *close("attention reaches", attention, AS_HIGH, write=percent),
    )
    return Finding(table, rows, layer <= MUCH_LOWER, absent, said, notes)
