"""Studies of heads: of different dims, and of dim 132 instead of 128."""

from collections.abc import Iterator

from gac.profiling.operators import operation, operator_named
from gac.profiling.records import Point
from gac.profiling.studies import published
from gac.profiling.studies.readings import Readings
from gac.profiling.studies.records import Cell, Column, Finding, Study, Verdict
from gac.profiling.studies.shapes import gemm, sdpa
from gac.profiling.studies.verdicts import ABSENT, percent, stated

UNIFORM = 128
WAYS = ("separate", "bucketed", "padded")

SEPARATE_SLOWER = 1.25
"""One by one is at least this much slower than padded (published for misaligned dims: 25 % and more)."""


def _settings() -> Iterator[tuple[int, int]]:
    """Heads and rows."""
    return ((heads, m) for heads in (8, 32) for m in (1, 2048))


def _way(way: str, heads: int, m: int) -> Point:
    dims = published.palu_dims()
    return Point(operation(f"batched_gemm_{way}", m=m, k=4096, heads=heads, low=dims[0], high=dims[-1]), "fp16")


def _uniform(heads: int, m: int) -> Point:
    return Point(operation("batched_gemm", b=heads, m=m, k=4096, n=UNIFORM), "fp16")


def _points() -> tuple[Point, ...]:
    ways = (_way(way, heads, m) for heads, m in _settings() for way in WAYS)
    return (*ways, *(_uniform(heads, m) for heads, m in _settings()))


def _heterogeneous(readings: Readings) -> Finding:
    rows: list[tuple[Cell, ...]] = []
    factors: dict[str, list[float | None]] = {way: [] for way in WAYS}
    for heads, m in _settings():
        padded = _way("padded", heads, m)
        for way in WAYS:
            ratio = readings.ratio(_way(way, heads, m), padded)
            factors[way].append(ratio)
            rows.append((heads, m, way, readings.us(_way(way, heads, m)), ratio))
        uniform = _uniform(heads, m)
        rows.append((heads, m, f"all at {UNIFORM}", readings.us(uniform), readings.ratio(uniform, padded)))
    known = [ratio for ratio in factors["separate"] if ratio is not None]
    separate = readings.middle(factors["separate"], "the cost of heads one by one")
    bucketed = readings.middle(factors["bucketed"], "the cost of buckets")
    verdict: Verdict = "did not hold" if max(known) < ABSENT else "other"
    if min(known) >= SEPARATE_SLOWER:
        verdict = "held"
    columns = (
        *(Column(text) for text in ("heads", "rows")),
        Column("way", side="<"),
        Column("measured", "us"),
        Column("over padded", "x"),
    )
    said = (
        f"heads of 114 to 125 dims one by one take {min(known):.2f}x to {max(known):.2f}x as long as padded to "
        f"one dim (median {separate:.2f}x), bucketed {bucketed:.2f}x"
    )
    return Finding(
        columns, tuple(rows), verdict, stated(verdict, said), ("no latency of this comparison is published",)
    )


HETEROGENEOUS_HEADS = Study(
    "heterogeneous-heads",
    "heads of different dims: one by one, bucketed, padded",
    "PaLU's score gives heads dims of 114 to 125, 96.9 % of them no multiple of 8; misaligned dims cost 25-60 %",
    "GAC's study, PaLU on Llama-3-8B, keep 0.8; cuBLAS kernel tiers, A100-80GB",
    f"rule: held where heads one by one take at least {SEPARATE_SLOWER:.2f}x as long as padded in every setting, did "
    f"not hold where they never take {ABSENT:.2f}x, other otherwise",
    _points,
    _heterogeneous,
)

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
    known = [ns for ns in map(readings.ns, points) if ns is not None]
    if len(known) < len(points):
        return None
    flops = sum(operator_named(point.operation.operator).flops(point.operation.axes) for point in points)
    return flops / sum(known) / 1e3


def _head_dim_132(readings: Readings) -> Finding:
    figures = {row.head_dim: row.tflops for row in published.head_dims()}
    ours = {d: _layer_tflops(readings, d) for d in (128, 132)}
    rows: list[tuple[Cell, ...]] = []
    for name in _layer(128):
        at_128, at_132 = (readings.tflops(_layer(d)[name]) for d in (128, 132))
        rows.append((name, at_128, at_132, _share(at_132, at_128), None, None))
    whole = _share(ours[132], ours[128])
    rows.append(("layer", ours[128], ours[132], whole, figures[128], figures[132]))
    layer = readings.middle([whole], "the throughput of the layer")
    attention = readings.middle([_attention_share(readings)], "the throughput of attention")
    verdict: Verdict = "held" if layer <= MUCH_LOWER else "other"
    if layer > MUCH_LOWER and min(layer, attention) >= AS_HIGH:
        verdict = "did not hold"
    columns = (
        Column("part", side="<"),
        *(Column(f"at {d}", "TFLOP/s") for d in (128, 132)),
        Column("132 over 128", "x"),
        *(Column(f"H100 training at {d}", "TFLOP/s") for d in (128, 132)),
    )
    said = (
        f"at 132 a layer's forward pass reaches {percent(layer)} of the throughput at 128 (training, H100: 59 %), its "
        f"attention {percent(attention)}"
    )
    notes = ("measured: the forward pass of one layer; published: training of a whole model",)
    return Finding(columns, tuple(rows), verdict, stated(verdict, said), notes)


def _attention_share(readings: Readings) -> float | None:
    at_128, at_132 = (readings.tflops(_layer(d)["attention"]) for d in (128, 132))
    return _share(at_132, at_128)


def _share(ours: float | None, full: float | None) -> float | None:
    return None if ours is None or full is None else ours / full


HEAD_DIM_132 = Study(
    "head-dim-132",
    "head_dim 132 instead of 128",
    "training reaches 370 TFLOP/s at head_dim 128 and 219 at 132",
    "Megatron, H100",
    f"rule: held where the layer reaches at most {percent(MUCH_LOWER)} of the throughput at 128, did not hold where "
    f"layer and attention both reach {percent(AS_HIGH)}, other otherwise",
    lambda: tuple(point for d in (128, 132) for point in _layer(d).values()),
    _head_dim_132,
)
