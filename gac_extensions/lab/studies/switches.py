"""The study of the GEMM along M: kernel switches of the heuristic, and whether a rise of latency there stays."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from gac_extensions.lab.studies import published
from gac_extensions.lab.studies.points import along
from gac_extensions.lab.studies.readings import Readings, close, known, main_kernel, times
from gac_extensions.lab.studies.records import Cell, Finding, Threshold, study
from gac_extensions.tokens.defaults import STEP

M_DIMS = tuple(sorted({m for base in range(1024, 2049, 8) for m in (base, base + 1)}))

WINDOW = 8  # measured M on each side of a switch (32 values of M) whose medians say whether its rise stays
LEAST = 4  # with fewer M on a side nothing is said to stay
NAMED = ((1088, 1089), (1152, 1153), (1728, 1729))  # the published switches; the last one raises the latency

SHOWN = 8


class Switch(NamedTuple):
    """Neighbouring M that different kernels serve: ``rise`` is the latency at ``high`` over that at ``low``.

    ``lasting``: median latency of the M after over that of the M before, at most ``rise``; None where too few M were
    measured on a side. ``alone``: the M after ``high`` falls back to the latency before.
    """

    low: int
    high: int
    rise: float
    lasting: float | None
    alone: bool


gemm_by_m = along("linear", "m", k=128, n=2048)  # the published GEMM M x 2048 x 128


@study("gemm-m", lambda: map(gemm_by_m, M_DIMS))
def gemm_m(readings: Readings, jump: Threshold, absent: Threshold) -> Finding:
    readings.require_kernels(map(gemm_by_m, M_DIMS))
    readings.median((readings.ns(gemm_by_m(m)) for m in M_DIMS), "the GEMM by M")
    switches = _switches(readings, absent)
    highest = max((switch.rise for switch in switches), default=1.0)
    lasting = [switch for switch in switches if switch.lasting is not None]
    longest = max(lasting, key=lambda switch: switch.lasting or 0.0, default=Switch(0, 0, 1.0, 1.0, False))
    stays = longest.lasting or 1.0
    where = f"at M {longest.low} to {longest.high}"
    return Finding(
        _rows(readings, switches),
        as_published=stays >= jump,
        absent=highest <= absent,
        values={"text": _sentence(readings, switches, jump, absent)},
        notes=(
            *([f"the largest rise that stays: {times(stays, jump)} {where}"] if lasting else ()),
            *_tokens_note(readings, absent),
            *close("the largest rise that stays", stays, jump),
            *close("the largest rise", highest, absent),
        ),
    )


def _switches(readings: Readings, absent: Threshold) -> list[Switch]:
    latencies = [readings.ns(gemm_by_m(m)) for m in M_DIMS]
    switches = []
    for index, (low, high) in enumerate(pairwise(M_DIMS), start=1):
        rise = readings.ratio(gemm_by_m(high), gemm_by_m(low))
        if rise is None or _names(readings, low) == _names(readings, high):
            continue
        before, after = known(latencies[max(0, index - WINDOW) : index]), known(latencies[index : index + WINDOW])
        following = known(latencies[index + 1 : index + WINDOW])
        lasting = min(rise, median(after) / median(before)) if min(len(before), len(after)) >= LEAST else None
        alone = bool(following) and following[0] < absent * before[-1]
        switches.append(Switch(low, high, rise, lasting, alone))
    return switches


def _names(readings: Readings, m: int) -> list[str]:
    return [launch.name for launch in readings.launches(gemm_by_m(m))]


def _rows(readings: Readings, switches: Sequence[Switch]) -> list[tuple[Cell, ...]]:
    lasting = {(switch.low, switch.high): switch.lasting for switch in switches}
    steepest = sorted(switches, key=lambda switch: -switch.rise)[:SHOWN]
    cost = f"switch, ~{published.rows('a100_gemm_sweeps', axis='m')[0].cost_percent} %"
    theirs = {pair: cost if pair == NAMED[-1] else "switch" for pair in NAMED}
    rows: list[tuple[Cell, ...]] = []
    for low, high in sorted({*NAMED, *((switch.low, switch.high) for switch in steepest)}):
        rise = readings.ratio(gemm_by_m(high), gemm_by_m(low))
        kernels = _kernels(readings, low, high)
        rows.append((f"{low} to {high}", rise, lasting.get((low, high)), *kernels, theirs.get((low, high))))
    return rows


def _kernels(readings: Readings, low: int, high: int) -> list[str | None]:
    """Describe both kernels by family and tile, by their label where that does not tell them apart."""
    kernels = [main_kernel(readings.launches(gemm_by_m(m))) for m in (low, high)]
    labels = [None if kernel is None else kernel.label for kernel in kernels]
    texts = [
        label if kernel is None or kernel.tile is None else f"{kernel.family} {kernel.tile[0]}x{kernel.tile[1]}"
        for kernel, label in zip(kernels, labels, strict=True)
    ]
    return labels if texts[0] == texts[1] and _names(readings, low) != _names(readings, high) else texts


def _sentence(readings: Readings, switches: Sequence[Switch], jump: Threshold, absent: Threshold) -> str:
    ratio = readings.ratio(*(gemm_by_m(m) for m in reversed(NAMED[-1])))
    here = "" if ratio is None else f"{times(ratio)} here, "
    published_switch = f"M 1728 to 1729: {here}about 1.30x on the A100"
    if not switches:
        return f"no kernel switch between M {M_DIMS[0]} and {M_DIMS[-1]} ({published_switch})"
    slower = sum(switch.rise > absent for switch in switches)
    cliffs = sum(switch.rise >= jump for switch in switches)
    stay = sum(lasting >= jump for lasting in known(switch.lasting for switch in switches))
    worst = max(switches, key=lambda switch: switch.rise)
    alone = f", M {worst.high} alone" if worst.alone and worst.rise > absent else ""
    return (
        f"of {len(switches)} kernel switches between M {M_DIMS[0]} and {M_DIMS[-1]}, {slower} raise the latency by "
        f"more than {absent:more}, {cliffs} by at least {jump:more}, {stay} of them for good; the steepest is "
        f"{times(worst.rise, absent, jump)} at M {worst.low} to {worst.high}{alone} ({published_switch})"
    )


def _tokens_note(readings: Readings, absent: Threshold) -> tuple[str, ...]:
    odd = known(readings.ratio(gemm_by_m(m), gemm_by_m(m + 7)) for m in M_DIMS if m % 8 == 1 and m + 7 in M_DIMS)
    steps = [m for m in M_DIMS if m % STEP == 0]
    grown = known(readings.ratio(gemm_by_m(low), gemm_by_m(high)) for low, high in pairwise(steps))
    if not odd or not grown:
        return ()
    slower = sum(ratio > absent for ratio in grown)
    return (
        "as tokens kept (scores of M cached tokens and 2048 queries, heads of 128): one past a multiple of 8 takes "
        f"{times(median(odd), absent)} as long as the next multiple; of {len(grown)} steps of {STEP} tokens, {slower} "
        f"are more than {absent:more} slower than with {STEP} more",
    )
