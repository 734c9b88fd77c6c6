"""The same instance through OR-Tools CP-SAT: a second opinion on an exact answer."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from time import perf_counter

import numpy as np

from gac.allocation.decide import Decision
from gac.allocation.knapsack import Group, Solution
from gac.allocation.knapsack.cp import cp_sat
from gac.allocation.knapsack.instance import reduced_items, rows_of, to_grains
from gac.allocation.knapsack.ragged import Ragged
from gac.allocation.problem import Instance
from gac.errors import GacError
from gac.plan import Certificate, Plan

logger = logging.getLogger("gac")

_SECONDS = 60.0
_SUM_BITS = 60
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class CrossCheck:
    """What CP-SAT says: its status, the value of its choice (None without one) and its lower bound.

    All in grains (``Solution.grain``), with each group's smallest loss counted as 0; ``value`` is the solution's own.
    ``seconds`` is what it took.
    """

    status: str
    objective: int | None
    bound: float
    value: int
    seconds: float

    @property
    def verdict(self) -> str:
        """In words; without a proof of its own, CP-SAT can only fail to contradict."""
        if self.objective is None:
            return "CP-SAT found no choice in time, and contradicts nothing"
        if self.objective < self.value:
            return f"CP-SAT found a choice that loses {1 - self.objective / self.value:.3g} less, within the stated gap"
        if self.status == "OPTIMAL":
            return "CP-SAT agrees: it proved the same optimum"
        return "CP-SAT found nothing better, and proved nothing in time"


def check_installed() -> None:
    """Refuse to go on without OR-Tools.

    Raises:
        GacError: it is not installed.
    """
    if find_spec("ortools") is None:
        raise GacError(
            "OR-Tools is not installed",
            "the package ortools, whose CP-SAT solves the instance a second time",
            "Install it with pip install ortools, or do not ask to verify.",
        )


def crosscheck(
    groups: Sequence[Group], limits: Sequence[int], solution: Solution, seconds: float = _SECONDS
) -> CrossCheck:
    """Solve the instance with CP-SAT, in the integers that ``knapsack`` compared, and compare.

    CP-SAT needs the sum of all coefficients to fit int64; on large instances it is given losses without their last
    bits (rounded down), and the choices are still compared with them.

    Args:
        seconds: what CP-SAT may take; out of time, its best choice and its bound must still not contradict.

    Raises:
        GacError: the two disagree (both values are named), the solution breaks a limit, the costs are too large for
            CP-SAT, or OR-Tools is not installed.
    """
    check_installed()
    began = perf_counter()
    rows = rows_of(groups, [int(limit) for limit in limits])
    if len(rows.limits) > len(limits):
        raise _too_large(rows.items)
    items = reduced_items(rows.items, rows.limits).items
    chosen = np.flatnonzero(np.asarray(solution.choice)[items.group] == items.origin)
    if len(chosen) != len(groups) or (items.used(chosen) > items.slack).any():
        raise GacError(
            f"the checked choice uses {solution.used}", f"at most {tuple(limits)}", "Report this as a defect of GAC."
        )
    values = to_grains(items.values, solution.grain)
    value = int(values[chosen].sum())
    worth = values <= value
    dropped = max(0, int(values[worth].sum(dtype=object)).bit_length() - _SUM_BITS)
    answer = cp_sat(replace(items, values=values >> dropped).keep(worth), seconds)
    if answer.status == "MODEL_INVALID":
        raise _too_large(items)
    found = None if answer.choice is None else np.flatnonzero(worth)[answer.choice]
    objective = None if found is None else int(values[found].sum())
    record = CrossCheck(answer.status, objective, answer.bound * 2.0**dropped, value, perf_counter() - began)
    lowest = value if solution.certificate.status == "optimal" else value - solution.certificate.gap / solution.grain
    if (
        record.status == "INFEASIBLE"
        or (objective is not None and objective < lowest)
        or record.bound > value * (1 + _TOLERANCE)
        or (record.status == "OPTIMAL" and (values[chosen] >> dropped).sum() < (values[found] >> dropped).sum())
    ):
        raise GacError(
            f"CP-SAT ends {record.status} with {objective} (bound {record.bound:.17g}) where the knapsack has {value}, "
            f"in units of {solution.grain:g}",
            "the same optimum",
            "Report this as a defect of GAC, with the instance.",
        )
    return record


def _too_large(items: Ragged) -> GacError:
    return GacError(
        f"an instance whose costs sum to {max(map(sum, items.costs.tolist()))}",
        "sums of all costs that fit int64, for CP-SAT",
        "Check a smaller instance, or give the costs in a larger unit.",
    )


def verified(decision: Decision) -> Plan:
    """The decision's plan after a cross-check of its instances; verdicts are logged, and kept in the certificates.

    For a plan that a rule made, it is the exact choice behind its bound that is checked.

    Raises:
        GacError: as for ``crosscheck``.
    """
    plan = decision.plan
    of_bound = plan.certificate is not decision.solution.certificate
    proof = _checked(plan.certificate, decision.instance, decision.solution, "of its bound " if of_bound else "")
    if decision.faster is None:
        return replace(plan, certificate=proof)
    assert plan.speed is not None
    quick = _checked(plan.speed.certificate, *decision.faster, "")
    return replace(plan, certificate=proof, speed=replace(plan.speed, certificate=quick))


def _checked(proof: Certificate, instance: Instance, solution: Solution, what: str) -> Certificate:
    logger.info("solving the same instance with CP-SAT, for %.0f s at most", _SECONDS)
    record = crosscheck(instance.groups, list(instance.limits.values()), solution)
    verdict = f"{what}{record.verdict}"
    logger.info("%s (%s, %.1f s)", verdict, record.status, record.seconds)
    return replace(proof, method=f"{proof.method}; {verdict}")
