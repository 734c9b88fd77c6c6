"""Studies of the GEMM and the GEMV along each of their axes."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

from gac.profiling.mechanisms.kernels import describe
from gac.profiling.records import Point
from gac.profiling.studies import published
from gac.profiling.studies.readings import Readings
from gac.profiling.studies.records import Column, Finding, Study, Verdict
from gac.profiling.studies.shapes import classes_note, gemm, gemm_by_k, slowdowns
from gac.profiling.studies.verdicts import ABSENT, band_rule, graded, stated

TIER_BAND = (1.25, 2.5)
"""Published: 25 to 60 % (of the throughput: 1.33x to 2.5x; 107 against 112 is 1.78x)."""

K_DIMS = range(64, 257)
N_DIMS = range(1000, 1065)
M_DIMS = tuple(sorted({m for base in range(1024, 2049, 8) for m in (base, base + 1)}))
GEMV_DIMS = range(4064, 4129)

SWITCH_JUMP = 1.25
"""A kernel switch whose latency rises by this much or more is a cliff (published: about 30 %)."""

GEMV_BAND = (1.05, 1.25)
"""Published: about 12 % on K and 4 % on N."""

_TIER_RULE = band_rule("median over misaligned dims of latency over that of the next multiple of 8", *TIER_BAND)


def gemm_by_n(n: int) -> Point:
    """A GEMM 4096 x N x 4096."""
    return gemm(4096, 4096, n)


def _gemm_k(readings: Readings) -> Finding:
    figures = {int(row.k): row.latency_ms for row in published.gemm("G3")}
    shown = sorted({*figures, 104, 105, 106, 108, 120})
    rows = tuple(
        (k, readings.ms(gemm_by_k(k)), slowdowns(readings, gemm_by_k, [k])[0] if k % 8 else None, figures.get(k))
        for k in shown
    )
    factor = readings.middle(slowdowns(readings, gemm_by_k, K_DIMS), "the slowdown of misaligned K")
    verdict = graded(factor, *TIER_BAND)
    columns = (Column("K"), Column("measured", "ms"), Column("over next multiple of 8", "x"), Column("A100", "ms"))
    at_107 = readings.ratio(gemm_by_k(107), gemm_by_k(112))
    example = "" if at_107 is None else f"; 107 takes {at_107:.2f}x as long as 112 (A100: 1.78x)"
    said = f"K that are no multiple of 8 take {factor:.2f}x as long as the next multiple{example}"
    return Finding(columns, rows, verdict, stated(verdict, said), (classes_note(readings, gemm_by_k, K_DIMS, "K"),))


GEMM_K = Study(
    "gemm-k",
    "GEMM 4096 x 4096 x K",
    "K % 8 != 0 costs 25-60 % (0.089 ms at K=107, 0.050 ms at K=112 and K=128)",
    "GAC's study, experiment G3, A100-80GB, GEMM 4096 x 4096 x K fp16",
    _TIER_RULE,
    lambda: tuple(gemm_by_k(k) for k in K_DIMS),
    _gemm_k,
)


def _gemm_n(readings: Readings) -> Finding:
    cost = published.constraint("cuBLAS kernel tier").cost_when_broken
    shown = (1000, 1001, 1002, 1004, 1008, 1016, 1017, 1018, 1020, 1024, 1025, 1032)
    rows = tuple(
        (
            n,
            readings.ms(gemm_by_n(n)),
            slowdowns(readings, gemm_by_n, [n])[0] if n % 8 else None,
            cost if n % 8 else None,
        )
        for n in shown
    )
    factor = readings.middle(slowdowns(readings, gemm_by_n, N_DIMS), "the slowdown of misaligned N")
    verdict = graded(factor, *TIER_BAND)
    columns = (Column("N"), Column("measured", "ms"), Column("over next multiple of 8", "x"), Column("A100 cost"))
    said = f"N that are no multiple of 8 take {factor:.2f}x as long as the next multiple (A100: 1.33x to 2.5x)"
    return Finding(columns, rows, verdict, stated(verdict, said), (classes_note(readings, gemm_by_n, N_DIMS, "N"),))


GEMM_N = Study(
    "gemm-n",
    "GEMM 4096 x N x 4096",
    "N % 8 != 0 costs 25-60 %, as K does",
    "GAC's study, cuBLAS kernel tiers, A100-80GB, fp16",
    _TIER_RULE,
    lambda: tuple(gemm_by_n(n) for n in N_DIMS),
    _gemm_n,
)


def gemm_by_m(m: int) -> Point:
    """The published GEMM M x 2048 x 128."""
    return gemm(m, 128, 2048)


def _gemm_m(readings: Readings) -> Finding:
    readings.require_kernels(gemm_by_m(m) for m in M_DIMS)
    readings.middle((readings.ns(gemm_by_m(m)) for m in M_DIMS), "the GEMM by M")
    switches = sorted(_switches(readings), key=lambda switch: -switch[2])
    named = {(1088, 1089), (1152, 1153), (1728, 1729)}
    found = {(low, high): ratio for low, high, ratio in switches}
    shown = [*((low, high) for low, high, _ in switches[:8]), *sorted(named - {key[:2] for key in switches[:8]})]
    rows = tuple(
        (
            f"{low} to {high}",
            readings.ratio(gemm_by_m(high), gemm_by_m(low)),
            _kernel(readings, low),
            _kernel(readings, high),
            {(1728, 1729): f"switch, ~{published.gemm_sweep('m').cost_percent} %"}.get(
                (low, high), "switch" if (low, high) in named else None
            ),
        )
        for low, high in sorted(shown)
    )
    worst = max(found.values(), default=1.0)
    verdict: Verdict = "held" if worst >= SWITCH_JUMP else "other" if switches else "did not hold"
    columns = (Column("M", side="<"), Column("rise", "x"), *(Column(text, side="<") for text in ("from", "to", "A100")))
    return Finding(
        columns, rows, verdict, stated(verdict, f"{_switches_said(found)} (A100: about 1.30x at M 1728 to 1729)")
    )


def _switches_said(found: Mapping[tuple[int, int], float]) -> str:
    """How many switches there are and what the worst of them costs."""
    if not found:
        return "no kernel switch between M 1024 and 2049"
    low, high = max(found, key=lambda pair: found[pair])
    counted = f"{len(found)} kernel switch{'es' if len(found) > 1 else ''} between M 1024 and 2049"
    return f"{counted}, the worst raises the latency {found[low, high]:.2f}x at M {low} to {high}"


def _switches(readings: Readings) -> Iterator[tuple[int, int, float]]:
    """Neighbouring M between which the kernel changes, and the ratio of their latencies."""
    for low, high in pairwise(M_DIMS):
        ratio = readings.ratio(gemm_by_m(high), gemm_by_m(low))
        if ratio is not None and _names(readings, low) != _names(readings, high):
            yield low, high, ratio


def _names(readings: Readings, m: int) -> tuple[str, ...]:
    return tuple(launch.name for launch in readings.launches(gemm_by_m(m)))


def _kernel(readings: Readings, m: int) -> str | None:
    kernels = [describe(name) for name in _names(readings, m)]
    return next((kernel.label for kernel in kernels if kernel.main), kernels[0].label if kernels else None)


GEMM_M = Study(
    "gemm-m",
    "GEMM M x 2048 x 128: kernel switches",
    "where the heuristic switches kernels latency jumps: about 30 % at M 1728 to 1729 (M is else not sensitive)",
    "arXiv 2604.09595, section 3.2, A100-80GB, M = 1024 to 2048, N = 2048, K = 128 fp16",
    "rule: M at every multiple of 8 and one past it; held where a switch of kernels between neighbours raises the "
    f"latency at least {SWITCH_JUMP:.2f}x, other where a switch costs less, did not hold where no kernel switches",
    lambda: tuple(gemm_by_m(m) for m in M_DIMS),
    _gemm_m,
)


def gemv_by_k(k: int) -> Point:
    """A GEMV 1 x 4096 x K."""
    return gemm(1, k, 4096)


def gemv_by_n(n: int) -> Point:
    """A GEMV 1 x N x 4096."""
    return gemm(1, 4096, n)


def _gemv(readings: Readings) -> Finding:
    costs = {
        axis: readings.middle(slowdowns(readings, at, GEMV_DIMS), f"the slowdown of misaligned {axis.upper()}")
        for axis, at in (("k", gemv_by_k), ("n", gemv_by_n))
    }
    rows = tuple(
        (axis.upper(), cost, 1 + published.gemm_sweep(f"gemv {axis}").cost_percent / 100)
        for axis, cost in costs.items()
    )
    least, most = GEMV_BAND
    smaller = costs["n"] <= costs["k"]
    verdict: Verdict = "did not hold" if costs["k"] < ABSENT else "other"
    if least <= costs["k"] <= most and smaller:
        verdict = "held"
    columns = (Column("axis", side="<"), Column("over next multiple of 8", "x"), Column("A100", "x"))
    said = f"misaligned K take {costs['k']:.2f}x as long and misaligned N {costs['n']:.2f}x (A100: 1.12x and 1.04x)"
    notes = (
        classes_note(readings, gemv_by_k, GEMV_DIMS, "K"),
        classes_note(readings, gemv_by_n, GEMV_DIMS, "N"),
    )
    return Finding(columns, rows, verdict, stated(verdict, said), notes)


GEMV = Study(
    "gemv",
    "GEMV 1 x N x K near 4096",
    "at M = 1 the penalty is smaller: about 12 % on K and 4 % on N",
    "arXiv 2604.09595, section 3.2, A100-80GB, M = 1, K and N near 4096, fp16",
    "rule: median over misaligned dims of latency over that of the next multiple of 8; held where K costs "
    f"{GEMV_BAND[0]:.2f}x to {GEMV_BAND[1]:.2f}x and N no more than K, did not hold where K costs less than "
    f"{ABSENT:.2f}x, other otherwise",
    lambda: (*(gemv_by_k(k) for k in GEMV_DIMS), *(gemv_by_n(n) for n in GEMV_DIMS)),
    _gemv,
)
