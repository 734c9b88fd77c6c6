"""Which shapes describe a GPU generally."""

from collections.abc import Iterable, Iterator

from gac.operations import Operation
from gac.profiling.operators import operation
from gac.profiling.records import Point
from gac.profiling.sweeps.coverage import check_dtype

FP8_SINCE = (8, 9)


def general_points(dtype: str = "bf16", compute_capability: tuple[int, int] = (9, 0)) -> tuple[Point, ...]:
    """About 5,000 points that describe a GPU: every operator along the axes that compression moves.

    Args:
        dtype: ``bf16`` or ``fp16``, of everything but the INT4 operators (bf16) and the fp8 ones.
        compute_capability: fp8 is measured from (8, 9) on.

    Raises:
        ProfileError: the dtype is none of the two.
    """
    check_dtype(dtype)
    usual = (
        *gemm_along_k_and_n(),
        *gemm_along_m(),
        *pairs_along_r(),
        *shared_pairs_along_r(),
        *batched_along_k_and_n(),
        *heads_of_different_dims(),
        *attention_prefill(),
        *attention_decode(),
        *attention_by_backend(),
        *small_enough_for_l2(),
        *copies(),
    )
    points = [Point(one, dtype) for one in usual]
    points += [Point(one, dtype, "hot") for one in small_enough_for_l2()]
    points += [Point(one, "bf16") for one in int4_along_m_and_n()]
    if compute_capability >= FP8_SINCE:
        points += [Point(one, "fp8") for one in fp8_along_k_and_n()]
    return tuple(dict.fromkeys(points))


def gemm_along_k_and_n() -> Iterator[Operation]:
    """GEMMs, and GEMVs at m=1, beside 4096: at m=1024 every multiple of 8 and five unbroken stretches of integers."""
    unbroken = (*_around(128, 24), *_around(256, 8), *_around(512, 8), *_around(1024, 16), *_around(2048, 8))
    usual = {*range(8, 1025, 8), *range(64, 4097, 64), *_around(128, 24), *_around(1024, 16)}
    few = {*range(128, 4097, 128), *_around(128, 8), *_around(1024, 8)}
    dims = {1024: {*range(8, 4097, 8), *unbroken}, 1: usual, 16: few, 4096: few}
    for m, ours in dims.items():
        yield from _along("k", ours, "linear", m=m, n=4096)
        yield from _along("n", ours, "linear", m=m, k=4096)


def gemm_along_m() -> Iterator[Operation]:
    """Where the heuristic changes kernels: every m up to 64, every 8 up to 512, every 64 up to 4096, and stretches."""
    dims = {*range(1, 65), *range(8, 513, 8), *range(64, 4097, 64), *_around(128, 4), *_around(1024, 4)}
    yield from _along("m", dims, "linear", k=4096, n=4096)
    yield from _along("m", {*range(1, 33), *range(64, 2049, 64)}, "linear", k=4096, n=1024)


def pairs_along_r() -> Iterator[Operation]:
    """Low-rank pairs up to the rank that saves no parameters: square, to a narrow and to a wide output."""
    unbroken = {*_around(256, 8), *_around(512, 8), *_around(1024, 16)}
    yield from _along("r", {*range(8, 2049, 8), *unbroken}, "low_rank", m=1024, k=4096, n=4096)
    yield from _along("r", {*range(32, 2049, 32), *unbroken}, "low_rank", m=1, k=4096, n=4096)
    yield from _along("r", {*range(8, 817, 8), *_around(256, 8)}, "low_rank", m=1024, k=4096, n=1024)
    yield from _along("r", {*range(64, 3137, 64), *_around(1024, 8)}, "low_rank", m=1024, k=4096, n=14336)
    yield from _along("r", {*range(64, 3137, 64), *_around(1024, 8)}, "low_rank", m=1024, k=14336, n=4096)


def shared_pairs_along_r() -> Iterator[Operation]:
    """Pairs that share their first GEMM, as q/k/v and gate/up can."""
    dims = {*range(32, 1025, 32), *_around(512, 4)}
    for m in (1, 1024):
        yield from _along("r", dims, "low_rank_shared", m=m, k=4096, n=1024, pairs=3)
        yield from _along("r", dims, "low_rank_shared", m=m, k=4096, n=4096, pairs=2)


def batched_along_k_and_n() -> Iterator[Operation]:
    """One GEMM a head, the head_dim as K (scores) and as N (values)."""
    dims = {*range(8, 257, 8), *_around(64, 8), *_around(128, 24)}
    yield from _along("k", dims, "batched_gemm", b=32, m=512, n=512)
    yield from _along("n", dims, "batched_gemm", b=32, m=512, k=512)


def heads_of_different_dims() -> Iterator[Operation]:
    """32 heads of dims from ``low`` to 128: one by one, in buckets, padded."""
    for way in ("separate", "bucketed", "padded"):
        yield from _along("low", range(64, 129, 8), f"batched_gemm_{way}", m=512, k=512, heads=32, high=128)


def attention_prefill() -> Iterator[Operation]:
    """Every head_dim from 8 to 256, causal and not; with four queries to a key head, multiples of 8 and some more."""
    some = {*range(8, 257, 8), *_around(64, 4), *_around(112, 20)}
    for name in ("sdpa", "sdpa_causal"):
        yield from _along("d", range(8, 257), name, b=1, h=32, kv=32, s=1024, t=1024)
        yield from _along("d", some, name, b=1, h=32, kv=8, s=1024, t=1024)


def attention_decode() -> Iterator[Operation]:
    """One query a sequence: every head_dim from 8 to 256 with four queries to a key head, and some with one."""
    some = {*range(8, 257, 8), *_around(128, 8)}
    yield from _along("d", range(8, 257), "sdpa", b=8, h=32, kv=8, s=1, t=2048)
    yield from _along("d", some, "sdpa", b=8, h=32, kv=32, s=1, t=2048)


def attention_by_backend() -> Iterator[Operation]:
    """Each backend at multiples of 8, and at 107 and 129, which some refuse; the slow Math backend at fewer."""
    for suffix in ("", "_causal"):
        for backend in ("flash", "efficient", "cudnn"):
            dims = {*range(8, 257, 8), 107, 129}
            yield from _along("d", dims, f"sdpa_{backend}{suffix}", b=1, h=32, kv=32, s=1024, t=1024)
        dims = {*range(32, 257, 32), 107, 129}
        yield from _along("d", dims, f"sdpa_math{suffix}", b=1, h=8, kv=8, s=1024, t=1024)


def small_enough_for_l2() -> Iterator[Operation]:
    """Shapes of at most 16 MB, measured hot and cold: what a weight that stays in L2 would seem to cost."""
    dims = range(64, 2049, 64)
    yield from _along("n", dims, "linear", m=1, k=4096)
    yield from _along("n", dims, "linear", m=1024, k=1024)
    yield from _along("r", range(64, 1025, 64), "low_rank", m=1, k=4096, n=4096)


def copies() -> Iterator[Operation]:
    """Device bandwidth from 2 KiB to 512 MiB: powers of two and the sizes half-way between."""
    yield from _along("n", (size for power in range(10, 29) for size in (2**power, 3 * 2 ** (power - 1))), "copy")


def int4_along_m_and_n() -> Iterator[Operation]:
    """Group-quantised weights, fused and dequantised: where fusing stops winning, and along the output."""
    rows = {*range(1, 33), *range(40, 129, 8), *range(192, 513, 64)}
    for name in ("int4_linear", "int4_linear_dequantised"):
        yield from _along("m", rows, name, k=4096, n=4096, group=128)
        yield from _along("n", range(64, 4097, 64), name, m=1, k=4096, group=128)


def fp8_along_k_and_n() -> Iterator[Operation]:
    """Multiples of 16, and four dims that break that rule; scaled by tensor, and at fewer dims by row."""
    breaking = {8, 520, 1016, 1023}
    fine, coarse = {*range(16, 1025, 16), *range(64, 4097, 64), *breaking}, {*range(64, 4097, 64), *breaking}
    for name, dims in (("linear", fine), ("linear_rowwise", coarse)):
        yield from _along("k", dims, name, m=1024, n=4096)
        yield from _along("n", dims, name, m=1024, k=4096)


def _along(axis: str, dims: Iterable[int], name: str, **fixed: int) -> Iterator[Operation]:
    return (operation(name, **fixed, **{axis: dim}) for dim in sorted(dims))


def _around(centre: int, half: int) -> range:
    return range(centre - half, centre + half + 1)
