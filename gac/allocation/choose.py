"""The choice: one candidate a site, within the budget and the latency limits."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from gac.allocation.candidates import UNKNOWN
from gac.allocation.knapsack import Group, knapsack
from gac.errors import BudgetError, ProfileError
from gac.plan import Certificate
from gac.sites import CandidateSet, Ints, Site, Workload


def budget_limit(budget: float, total: int) -> int:
    """``floor(budget * total)`` in exact integers.

    The budget counts as the decimal that it prints as: 0.8 is eight tenths, not the nearest double.

    >>> budget_limit(0.8, 106168320), budget_limit(0.29, 100), int(0.29 * 100)
    (84934656, 29, 28)

    Raises:
        BudgetError: the budget is no number, or not in (0, 1].
    """
    if not _is_number(budget) or not 0 < budget <= 1:
        raise BudgetError(
            f"budget {budget!r}",
            "a number above 0 and at most 1, the kept fraction of the targeted parameters",
            "Give a budget such as 0.8.",
        )
    return _floor(budget, total)


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


def choose(
    sites: Sequence[Site],
    candidate_sets: Sequence[CandidateSet],
    budget_limit: int,
    latency_limits: Mapping[Workload, int | None],
    *,
    seconds: float = 60.0,
) -> tuple[list[int], Certificate]:
    """The candidates that lose least in sum, with the proof.

    Args:
        sites: in the order of ``candidate_sets``.
        budget_limit: most parameters of all sites together.
        latency_limits: most ns of all sites together for each workload, in the order of the columns of the candidates'
            latencies, None where not limited; empty where none is. Candidates whose latency under a limited workload
            is unknown are left out.
        seconds: as for ``knapsack``.

    Returns:
        The row of each site's candidate set, and the certificate.

    Raises:
        BudgetError: a limit cannot be met; says what can be.
        ProfileError: a latency is limited, and a site has no candidate whose latency is known.
    """
    limited = [(column, workload) for column, (workload, ns) in enumerate(latency_limits.items()) if ns is not None]
    columns = [column for column, _ in limited]
    kept = [
        _known(site, rows, columns, " and ".join(str(workload) for _, workload in limited))
        for site, rows in zip(sites, candidate_sets, strict=True)
    ]
    groups = [
        Group(rows.site, rows.loss[at], np.column_stack([rows.params[at], rows.latency[at][:, columns]]))
        for rows, at in zip(candidate_sets, kept, strict=True)
    ]
    limits = [budget_limit, *(limit for limit in latency_limits.values() if limit is not None)]
    names = ["the parameter limit", *(f"the latency limit in ns for {workload}" for _, workload in limited)]
    solution = knapsack(groups, limits, names=names, seconds=seconds)
    chosen = [int(at[item]) for at, item in zip(kept, solution.choice, strict=True)]
    used = sum(int(rows.params[row]) for rows, row in zip(candidate_sets, chosen, strict=True))
    assert used <= budget_limit, f"{used} parameters chosen, {budget_limit} allowed"
    return chosen, solution.certificate


def _known(site: Site, rows: CandidateSet, columns: Sequence[int], workloads: str) -> Ints:
    """Rows whose latency is known in each of the columns."""
    assert site.name == rows.site, f"candidates of {rows.site} for {site.name}"
    known = (rows.latency[:, columns] != UNKNOWN).all(axis=1)
    if not known.any():
        raise _unprofiled(site.name, workloads)
    return np.flatnonzero(known)


def _unprofiled(site: str, workloads: str) -> ProfileError:
    return ProfileError(
        f"the profile lacks the latency of {site} for {workloads}",
        "measured latencies, since latency is limited",
        "Profile this model's shapes with gac profile, or plan without a latency limit.",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _floor(fraction: float, total: int) -> int:
    return math.floor(Fraction(repr(float(fraction))) * total)
