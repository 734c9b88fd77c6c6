"""Which shapes describe a GPU generally."""

from collections.abc import Iterable, Iterator, Sequence

from gac.core.operations import Operation
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.records import Point
from gac.profiling.sweeps.coverage import check_dtype, measured_schemes
from gac.schemes import Scheme

FP8_SINCE = (8, 9)

Along = tuple[str, str, Iterable[int], dict[str, int]]
"""An operator, the axis that moves, its dims in any order, and the other axes."""


def _around(centre: int, half: int) -> range:
    return range(centre - half, centre + half + 1)


_STRETCHES = (*_around(128, 24), *_around(256, 8), *_around(512, 8), *_around(1024, 16), *_around(2048, 8))
_FEW = {*range(128, 4097, 128), *_around(128, 8), *_around(1024, 8)}
_BY_M: dict[int, set[int]] = {
    1024: {*range(8, 4097, 8), *_STRETCHES},
    1: {*range(8, 1025, 8), *range(64, 4097, 64), *_around(128, 24), *_around(1024, 16)},
    16: _FEW,
    4096: _FEW,
}
_SWITCHING_M = {*range(1, 65), *range(8, 513, 8), *range(64, 4097, 64), *_around(128, 4), *_around(1024, 4)}
_UNBROKEN = {*_around(256, 8), *_around(512, 8), *_around(1024, 16)}
_WIDE = {*range(64, 3137, 64), *_around(1024, 8)}
_SHARED = {*range(32, 1025, 32), *_around(512, 4)}
_HEADS = {*range(8, 257, 8), *_around(64, 8), *_around(128, 24)}
_FEW_HEADS = {*range(8, 257, 8), *_around(64, 4), *_around(112, 20)}
_IN_L2 = range(64, 2049, 64)
_PREFILL = {"b": 1, "h": 32, "s": 1024, "t": 1024}
_DECODE = {"b": 8, "h": 32, "s": 1, "t": 2048}

# Shapes of at most 16 MB, measured hot and cold: what a weight that stays in L2 would seem to cost.
_SMALL: tuple[Along, ...] = (
    ("linear", "n", _IN_L2, {"m": 1, "k": 4096}),
    ("linear", "n", _IN_L2, {"m": 1024, "k": 1024}),
    ("low_rank", "r", range(64, 1025, 64), {"m": 1, "k": 4096, "n": 4096}),
)

_USUAL: tuple[Along, ...] = (
    # GEMMs, and GEMVs at m=1, beside 4096: at m=1024 every multiple of 8 and five unbroken stretches of integers.
    *(("linear", axis, dims, {"m": m, other: 4096}) for m, dims in _BY_M.items() for axis, other in ("kn", "nk")),
    # Where the heuristic changes kernels: every m up to 64, every 8 up to 512, every 64 up to 4096, and stretches.
    ("linear", "m", _SWITCHING_M, {"k": 4096, "n": 4096}),
    ("linear", "m", {*range(1, 33), *range(64, 2049, 64)}, {"k": 4096, "n": 1024}),
    # Low-rank pairs up to the rank that saves no parameters: square, to a narrow and to a wide output.
    ("low_rank", "r", {*range(8, 2049, 8), *_UNBROKEN}, {"m": 1024, "k": 4096, "n": 4096}),
    ("low_rank", "r", {*range(32, 2049, 32), *_UNBROKEN}, {"m": 1, "k": 4096, "n": 4096}),
    ("low_rank", "r", {*range(8, 817, 8), *_around(256, 8)}, {"m": 1024, "k": 4096, "n": 1024}),
    ("low_rank", "r", _WIDE, {"m": 1024, "k": 4096, "n": 14336}),
    ("low_rank", "r", _WIDE, {"m": 1024, "k": 14336, "n": 4096}),
    # Pairs that share their first GEMM, as q/k/v and gate/up can.
    *(
        ("low_rank_shared", "r", _SHARED, {"m": m, "k": 4096, "n": n, "pairs": pairs})
        for m in (1, 1024)
        for n, pairs in ((1024, 3), (4096, 2))
    ),
    # One GEMM a head, the head_dim as K (scores) and as N (values).
    *(("batched_gemm", axis, _HEADS, {"b": 32, "m": 512, other: 512}) for axis, other in ("kn", "nk")),
    # 32 heads of dims from ``low`` to 128: one by one, in buckets, padded.
    *(
        (f"batched_gemm_{way}", "low", range(64, 129, 8), {"m": 512, "k": 512, "heads": 32, "high": 128})
        for way in ("separate", "bucketed", "padded")
    ),
    # Every head_dim from 8 to 256, causal and not; with four queries to a key head, multiples of 8 and some more.
    *(
        (name, "d", dims, _PREFILL | {"kv": kv})
        for name in ("sdpa", "sdpa_causal")
        for kv, dims in ((32, range(8, 257)), (8, _FEW_HEADS))
    ),
    # One query a sequence: every head_dim from 8 to 256 with four queries to a key head, and some with one.
    ("sdpa", "d", range(8, 257), _DECODE | {"kv": 8}),
    ("sdpa", "d", {*range(8, 257, 8), *_around(128, 8)}, _DECODE | {"kv": 32}),
    # The same along the cached tokens, of which some may be evicted: every 64, and a stretch of integers.
    ("sdpa", "t", {*range(64, 2049, 64), *_around(1024, 16)}, {"b": 8, "h": 32, "kv": 8, "s": 1, "d": 128}),
    # Each backend at multiples of 8, and at 107 and 129, which some refuse; the slow Math backend at fewer.
    *(
        (f"sdpa_{backend}{suffix}", "d", {*range(step, 257, step), 107, 129}, _PREFILL | {"h": heads, "kv": heads})
        for suffix in ("", "_causal")
        for backend, step, heads in (("flash", 8, 32), ("efficient", 8, 32), ("cudnn", 8, 32), ("math", 32, 8))
    ),
    *_SMALL,
    # Device bandwidth from 2 KiB to 512 MiB: powers of two and the sizes half-way between.
    ("copy", "n", [size for power in range(10, 29) for size in (2**power, 3 * 2 ** (power - 1))], {}),
)

# Group-quantised weights, fused and dequantised: where fusing stops winning, and along the output.
_INT4_ROWS = {*range(1, 33), *range(40, 129, 8), *range(192, 513, 64)}
_INT4: tuple[Along, ...] = tuple(
    (name, axis, dims, {"k": 4096, "group": 128} | fixed)
    for name in ("int4_linear", "int4_linear_dequantised")
    for axis, dims, fixed in (("m", _INT4_ROWS, {"n": 4096}), ("n", range(64, 4097, 64), {"m": 1}))
)

# Multiples of 16, and four dims that break that rule; scaled by tensor, and at fewer dims by row.
_BREAKING = {8, 520, 1016, 1023}
_FP8: tuple[Along, ...] = tuple(
    (name, axis, {*dims, *range(64, 4097, 64), *_BREAKING}, {"m": 1024, other: 4096})
    for name, dims in (("linear", range(16, 1025, 16)), ("linear_rowwise", ()))
    for axis, other in ("kn", "nk")
)


def general_points(
    dtype: str = "bf16", compute_capability: tuple[int, int] = (9, 0), schemes: Sequence[str] = ()
) -> tuple[Point, ...]:
    """About 5,000 points that describe a GPU: every operator along the axes that compression moves.

    Args:
        dtype: ``bf16`` or ``fp16``, of everything but the INT4 operators (bf16) and the fp8 ones.
        compute_capability: fp8 is measured from (8, 9) on.
        schemes: in which schemes GEMMs are measured besides, at the shapes that each runs.

    Raises:
        PlanError: a scheme is unknown.
        ProfileError: the dtype is none of the two, or what a scheme runs is not measured.
    """
    check_dtype(dtype)
    points = [
        *(Point(one, dtype) for one in _operations(_USUAL)),
        *(Point(one, dtype, "hot") for one in _operations(_SMALL)),
        *(Point(one, "bf16") for one in _operations(_INT4)),
        *(Point(one, "fp8") for one in _operations(_FP8) if compute_capability >= FP8_SINCE),
        *(point for scheme in measured_schemes(schemes) for point in _in_scheme(scheme)),
    ]
    return tuple(dict.fromkeys(points))


def _in_scheme(scheme: Scheme) -> Iterator[Point]:
    """The usual shapes of operators whose weights can be stored so."""
    for one in map(scheme.operation, _operations(_USUAL)):
        operator = OPERATORS.get(one.operator)
        if operator.takes(scheme.dtype) and operator.refusal(one.axes, scheme.dtype) is None:
            yield Point(one, scheme.dtype)


def _operations(sweeps: Iterable[Along]) -> Iterator[Operation]:
    for name, axis, dims, fixed in sweeps:
        yield from (operation(name, **fixed, **{axis: dim}) for dim in sorted(dims))
