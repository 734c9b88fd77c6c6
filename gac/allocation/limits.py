"""What a choice may take: a budget and latency limits, as fractions of the dense model's, in exact integers."""

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from gac.allocation.candidates import CandidateSet
from gac.allocation.latencies import UNKNOWN
from gac.errors import BudgetError, ProfileError
from gac.workloads import Workload

_ALIGN = re.compile(r"profile(?:, ?group=([0-9]{1,9}))?")


def budget_limit(budget: float, total: int) -> int:
    """``floor(budget * total)`` in exact integers.

    The budget counts as the decimal that it prints as: 0.8 is eight tenths, not the nearest double.

    >>> budget_limit(0.8, 106168320), budget_limit(0.29, 100), int(0.29 * 100)
    (84934656, 29, 28)

    Raises:
        BudgetError: the budget is no number, or not in (0, 1].
    """
    return _kept(
        budget,
        total,
        f"budget {budget!r}",
        "a number above 0 and at most 1, the kept fraction of the targeted parameters",
        "Give a budget such as 0.8.",
    )


def cache_limit(fraction: float, total: int) -> int:
    """``floor(fraction * total)`` of what the KV cache keeps of a token, in exact integers.

    Raises:
        BudgetError: the fraction is no number, or not in (0, 1].
    """
    return _kept(
        fraction,
        total,
        f"KV-cache limit {fraction!r}",
        "a number above 0 and at most 1, the kept fraction of the dense model's KV cache",
        "Give a limit such as 0.75.",
    )


def latency_limits(
    dense: Sequence[CandidateSet], workloads: Sequence[Workload], fractions: Mapping[str, float]
) -> dict[Workload, int | None]:
    """What each workload may take in ns, ``floor(fraction * dense latency)`` in exact integers; None: not limited.

    Args:
        dense: the dense candidate of every site.
        workloads: what the columns of the candidates' latencies are.
        fractions: by ``str(workload)``, for those that are limited; taken as the decimals that they print as.

    Raises:
        BudgetError: a fraction is not a positive number, or is for something that is none of the workloads.
        ProfileError: the latency of a dense site is unknown, so that there is no fraction of it.
    """
    for name in fractions:
        if name not in map(str, workloads):
            raise BudgetError(
                f"latency limit for workload {name!r}",
                f"one of the plan's workloads ({', '.join(map(str, workloads)) or 'none'})",
                "Add it to the workloads, or drop the limit.",
            )
    limits: dict[Workload, int | None] = dict.fromkeys(workloads)
    for column, workload in enumerate(workloads):
        if str(workload) in fractions:
            limits[workload] = _latency_limit(dense, column, workload, fractions[str(workload)])
    return limits


def parse_align(align: object) -> bool | int:
    """What dims are kept to: True for those that the profile shows to be sound, a number for its multiples among them.

    >>> parse_align("profile,group=128"), parse_align("profile"), parse_align(16)
    (128, True, 16)

    Args:
        align: a bool, a number, ``profile``, or ``profile,group=N``, where N is how many neighbouring inputs share a
            scale in weights that are quantised later on (GPTQ, AWQ and torchao: 128): every rank and width is then a
            whole number of groups.

    Raises:
        BudgetError: it is none of these.
    """
    found = align
    if isinstance(align, str):
        match = _ALIGN.fullmatch(align)
        found = None if match is None else True if match[1] is None else int(match[1])
    if isinstance(found, bool) or (isinstance(found, int) and found >= 1):
        return found
    raise BudgetError(
        f"align={align!r}",
        "True, False, the number that dims are to be multiples of, or 'profile,group=N'",
        "Give a number of 1 or more, such as align=16.",
    )


def _latency_limit(dense: Sequence[CandidateSet], column: int, workload: Workload, fraction: float) -> int:
    if not _is_number(fraction) or not 0 < fraction < math.inf:
        raise BudgetError(
            f"latency limit {fraction!r} for {workload}",
            "a number above 0, the allowed fraction of the dense latency",
            "Give a limit such as 0.9.",
        )
    for rows in dense:
        if rows.latency[0, column] == UNKNOWN:
            raise _unprofiled(rows.site, str(workload))
    return _floor(fraction, sum(int(rows.latency[0, column]) for rows in dense))


def _unprofiled(site: str, workloads: str) -> ProfileError:
    return ProfileError(
        f"the profile lacks the latency of {site} for {workloads}",
        "measured latencies, since latency is limited",
        "Profile this model's shapes with gac profile, or plan without a latency limit.",
    )


def _kept(fraction: float, total: int, given: str, expected: str, remedy: str) -> int:
    """That fraction of the total, rounded down; an error in these words where it is none."""
    if not _is_number(fraction) or not 0 < fraction <= 1:
        raise BudgetError(given, expected, remedy)
    return _floor(fraction, total)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _floor(fraction: float, total: int) -> int:
    return math.floor(Fraction(repr(float(fraction))) * total)
