"""The study of the GEMM along M: where the heuristic switches kernels, and whether a rise of latency there stays."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from gac.lab.studies import published
from gac.lab.studies.readings import Readings, known
from gac.lab.studies.records import ABSENT, Cell, Finding, close, study, times
from gac.lab.studies.served import main_kernel
from gac.lab.studies.shapes import gemm
from gac.profiling.kernel_names import Kernel
from gac.profiling.records import Point
from gac.tokens.defaults import STEP

M_DIMS = tuple(sorted({m for base in range(1024, 2049, 8) for m in (base, base + 1)}))

SWITCH_JUMP = 1.25
"""A rise by this much or more is the published cliff (about 30 %)."""

WINDOW = 8
"""Measured M on each side of a switch (32 values of M) whose medians say whether its rise stays."""

LEAST = 4
"""Short of this many M on a side nothing is said to stay."""

NAMED = ((1088, 1089), (1152, 1153), (1728, 1729))
"""The published switches; the last one raises the latency."""

SHOWN = 8


@dataclass(frozen=True)
class Switch:
    """Neighbouring M that different kernels serve.

    Attributes:
        low: the M before.
        high: the M after.
        rise: latency at ``high`` over that at ``low``.
        stays: how much of the rise is there to stay: the median latency of the M after over that of the M before,
            at most ``rise``; None where too few M were measured on a side.
        alone: whether the M after the next falls back to where the latency was.
    """

    low: int
    high: int
    rise: float
    stays: float | None
    alone: bool


def gemm_by_m(m: int) -> Point:
    """The published GEMM M x 2048 x 128."""
    return gemm(m, 128, 2048)


def _switches(readings: Readings) -> list[Switch]:
    """Every switch of kernels, by M."""
    latencies = [readings.ns(gemm_by_m(m)) for m in M_DIMS]
    found = []
    for number, (low, high) in enumerate(pairwise(M_DIMS), start=1):
        rise = readings.ratio(gemm_by_m(high), gemm_by_m(low))
        if rise is None or _names(readings, low) == _names(readings, high):
            continue
        before, after = latencies[max(0, number - WINDOW) : number], latencies[number : number + WINDOW]
        found.append(Switch(low, high, rise, _stays(before, after, rise), _falls_back(before, after)))
    return found


def _stays(before: Sequence[float | None], after: Sequence[float | None], rise: float) -> float | None:
    below, above = known(before), known(after)
    return min(rise, median(above) / median(below)) if min(len(below), len(above)) >= LEAST else None


def _falls_back(before: Sequence[float | None], after: Sequence[float | None]) -> bool:
    """Whether the M after the first is no slower than the last M before the switch."""
    low, following = before[-1], next(iter(known(after[1:])), None)
    return low is not None and following is not None and following < ABSENT * low


def _names(readings: Readings, m: int) -> tuple[str, ...]:
    return tuple(launch.name for launch in readings.launches(gemm_by_m(m)))


@study(
    "gemm-m",
    "GEMM M x 2048 x 128: kernel switches",
    "where the heuristic switches kernels latency jumps: about 30 % at M 1728 to 1729 (M is else not sensitive)",
    "arXiv 2604.09595, section 3.2, A100-80GB, M = 1024 to 2048, N = 2048, K = 128 fp16",
    "rule: M at every multiple of 8 and one past it; a rise at a switch of kernels stays as far as the median of the "
    f"{WINDOW} measured M after it exceeds that of the {WINDOW} before; held where a rise of at least "
    f"{SWITCH_JUMP:.2f}x stays, other where a switch raises the latency by more than 5 %, if only at a single M, did "
    "not hold where none does",
    lambda: tuple(gemm_by_m(m) for m in M_DIMS),
)
def gemm_m(readings: Readings) -> Finding:
    readings.require_kernels(gemm_by_m(m) for m in M_DIMS)
    readings.middle((readings.ns(gemm_by_m(m)) for m in M_DIMS), "the GEMM by M")
    switches = _switches(readings)
    worst = max((switch.rise for switch in switches), default=1.0)
    lasting = max(known(switch.stays for switch in switches), default=1.0)
    table = ("<M", "rise|x", "rise that stays|x", "<from", "<to", "<A100")
    notes = (
        *_counted(switches),
        *_tokens_kept(readings),
        *close("the largest rise that stays", lasting, SWITCH_JUMP),
        *close("the largest rise", worst, ABSENT),
    )
    held, absent = lasting >= SWITCH_JUMP, worst <= ABSENT
    return Finding(table, _rows(readings, switches), held, absent, _said(readings, switches), notes)


def _rows(readings: Readings, switches: Sequence[Switch]) -> tuple[tuple[Cell, ...], ...]:
    """The switches that raise the latency most, and the published ones."""
    by_pair = {(switch.low, switch.high): switch for switch in switches}
    steepest = sorted(switches, key=lambda switch: -switch.rise)[:SHOWN]
    pairs = sorted({*NAMED, *((switch.low, switch.high) for switch in steepest)})
    cost = f"switch, ~{published.rows('a100_gemm_sweeps', axis='m')[0].cost_percent} %"
    theirs = {pair: cost if pair == NAMED[-1] else "switch" for pair in NAMED}
    return tuple(
        (
            f"{low} to {high}",
            readings.ratio(gemm_by_m(high), gemm_by_m(low)),
            by_pair[low, high].stays if (low, high) in by_pair else None,
            *_kernels(readings, low, high),
            theirs.get((low, high)),
        )
        for low, high in pairs
    )


def _kernels(readings: Readings, low: int, high: int) -> tuple[str | None, str | None]:
    """Both kernels by family and tile; by their names where that does not tell them apart."""
    kernels = [main_kernel(readings.launches(gemm_by_m(m))) for m in (low, high)]
    before, after = ("" if kernel is None else _tiled(kernel) for kernel in kernels)
    if before == after and _names(readings, low) != _names(readings, high):
        before, after = ("" if kernel is None else kernel.label for kernel in kernels)
    return before or None, after or None


def _tiled(kernel: Kernel) -> str:
    return kernel.label if kernel.tile is None else f"{kernel.family} {kernel.tile[0]}x{kernel.tile[1]}"


def _said(readings: Readings, switches: Sequence[Switch]) -> str:
    """How many switches there are, what they cost, and what the published one costs here."""
    at_published = readings.ratio(*(gemm_by_m(m) for m in reversed(NAMED[-1])))
    here = "" if at_published is None else f"{times(at_published)} here, "
    published_one = f"M 1728 to 1729: {here}about 1.30x on the A100"
    if not switches:
        return f"no kernel switch between M {M_DIMS[0]} and {M_DIMS[-1]} ({published_one})"
    slower, stay = sum(switch.rise > ABSENT for switch in switches), known(switch.stays for switch in switches)
    cliffs = sum(switch.rise >= SWITCH_JUMP for switch in switches)
    return (
        f"of {len(switches)} kernel switches between M {M_DIMS[0]} and {M_DIMS[-1]}, {slower} raise the latency by "
        f"more than 5 %, {cliffs} by at least 25 %, {sum(stays >= SWITCH_JUMP for stays in stay)} of "
        f"them for good; the steepest {_steepest(switches)} ({published_one})"
    )


def _steepest(switches: Sequence[Switch]) -> str:
    worst = max(switches, key=lambda switch: switch.rise)
    alone = f", M {worst.high} alone" if worst.alone and worst.rise > ABSENT else ""
    return f"is {times(worst.rise, ABSENT, SWITCH_JUMP)} at M {worst.low} to {worst.high}{alone}"


def _counted(switches: Sequence[Switch]) -> tuple[str, ...]:
    """The largest rise that stays, and where."""
    told = [(switch.stays, switch) for switch in switches if switch.stays is not None]
    if not told:
        return ()
    stays, most = max(told, key=lambda pair: pair[0])
    return (f"the largest rise that stays: {times(stays, SWITCH_JUMP)} at M {most.low} to {most.high}",)


def _tokens_kept(readings: Readings) -> tuple[str, ...]:
    """What the axis says of tokens kept: M cached tokens against 2048 queries, in heads of 128 numbers."""
    odd = known(readings.ratio(gemm_by_m(m), gemm_by_m(m + 7)) for m in M_DIMS if m % 8 == 1 and m + 7 in M_DIMS)
    steps = [m for m in M_DIMS if m % STEP == 0]
    grown = known(readings.ratio(gemm_by_m(low), gemm_by_m(high)) for low, high in pairwise(steps))
    if not odd or not grown:
        return ()
    slower = sum(ratio > ABSENT for ratio in grown)
    return (
        "as tokens kept (scores of M cached tokens and 2048 queries, heads of 128): one past a multiple of 8 takes "
        f"{times(median(odd), ABSENT)} as long as the next multiple; of {len(grown)} steps of {STEP} tokens, {slower} "
        f"are more than 5 % slower than with {STEP} more",
    )
