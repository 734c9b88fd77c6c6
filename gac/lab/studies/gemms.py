"""Studies of the GEMM along K and N, and of the GEMV."""

from gac.lab.studies import published
from gac.lab.studies.readings import Readings
from gac.lab.studies.records import ABSENT, NOISE, Band, Finding, close, percent, study, times
from gac.lab.studies.shapes import along, classes_note, example, gemm, gemm_by_k, slowdowns
from gac.profiling.records import Point

TIER_BAND = Band(1.25, 2.5)
"""Published: 25 to 60 % (of the throughput: 1.33x to 2.5x; 107 against 112 is 1.78x)."""

K_DIMS = range(64, 257)
N_DIMS = range(1000, 1065)
GEMV_DIMS = range(4064, 4129)

GEMV_BAND = (ABSENT, 1.25)
"""Published: about 12 % on K and 4 % on N."""

_TIER_RULE = TIER_BAND.rule("median over misaligned dims of latency over that of the next multiple of 8")


def gemm_by_n(n: int) -> Point:
    """A GEMM 4096 x N x 4096."""
    return gemm(4096, 4096, n)


@study(
    "gemm-k",
    "GEMM 4096 x 4096 x K",
    "K % 8 != 0 costs 25-60 % (0.089 ms at K=107, 0.050 ms at K=112 and K=128)",
    "GAC's study, experiment G3, A100-80GB, GEMM 4096 x 4096 x K fp16",
    _TIER_RULE,
    lambda: tuple(gemm_by_k(k) for k in K_DIMS),
)
def gemm_k(readings: Readings) -> Finding:
    figures = published.gemm_ms()
    shown = {k: figures.get(k) for k in sorted({*figures, 104, 105, 106, 108, 120})}
    rest = example(readings, gemm_by_k, "1.78x")
    return along(readings, TIER_BAND, ("K", "K"), gemm_by_k, K_DIMS, shown, "A100|ms", rest)


@study(
    "gemm-n",
    "GEMM 4096 x N x 4096",
    "N % 8 != 0 costs 25-60 %, as K does",
    "GAC's study, cuBLAS kernel tiers, A100-80GB, fp16",
    _TIER_RULE,
    lambda: tuple(gemm_by_n(n) for n in N_DIMS),
)
def gemm_n(readings: Readings) -> Finding:
    (constraint,) = published.rows("constraints", mechanism="cuBLAS kernel tier")
    dims = (1000, 1001, 1002, 1004, 1008, 1016, 1017, 1018, 1020, 1024, 1025, 1032)
    shown = {n: constraint.cost_when_broken if n % 8 else None for n in dims}
    theirs, rest = "A100, lost throughput", " (A100: 1.33x to 2.5x)"
    return along(readings, TIER_BAND, ("N", "N"), gemm_by_n, N_DIMS, shown, theirs, rest)


def gemv_by_k(k: int) -> Point:
    """A GEMV 1 x 4096 x K."""
    return gemm(1, k, 4096)


def gemv_by_n(n: int) -> Point:
    """A GEMV 1 x N x 4096."""
    return gemm(1, 4096, n)


@study(
    "gemv",
    "GEMV 1 x N x K near 4096",
    "at M = 1 the penalty is smaller: about 12 % on K and 4 % on N",
    "arXiv 2604.09595, section 3.2, A100-80GB, M = 1, K and N near 4096, fp16",
    "rule: median over misaligned dims of latency over that of the next multiple of 8; held where K costs "
    f"{GEMV_BAND[0]:.2f}x to {GEMV_BAND[1]:.2f}x and N no more than K (within {percent(NOISE)}), did not hold where K "
    f"costs less than {ABSENT:.2f}x, other otherwise",
    lambda: (*(gemv_by_k(k) for k in GEMV_DIMS), *(gemv_by_n(n) for n in GEMV_DIMS)),
)
def gemv(readings: Readings) -> Finding:
    k, n = (
        readings.middle(slowdowns(readings, at, GEMV_DIMS), f"the slowdown of misaligned {axis}")
        for axis, at in (("K", gemv_by_k), ("N", gemv_by_n))
    )
    theirs = {row.axis: 1 + row.cost_percent / 100 for row in published.rows("a100_gemm_sweeps")}
    rows = (("K", k, theirs["gemv k"]), ("N", n, theirs["gemv n"]))
    least, most = GEMV_BAND
    inside = least <= k <= most
    held = inside and n <= (1 + NOISE) * k
    said = (
        f"misaligned K take {times(k, *GEMV_BAND)} as long as the next multiple of 8 and misaligned N {times(n)} "
        "(A100: 1.12x and 1.04x)"
    )
    notes = (
        classes_note(readings, gemv_by_k, GEMV_DIMS, "K"),
        classes_note(readings, gemv_by_n, GEMV_DIMS, "N"),
        *close("K", k, *GEMV_BAND),
        *(close("N over K", n / k, 1 + NOISE) if inside else ()),
    )
    return Finding(("<axis", "over next multiple of 8|x", "A100|x"), rows, held, k < ABSENT, said, notes)
