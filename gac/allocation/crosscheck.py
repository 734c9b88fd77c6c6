"""Cross-check of a choice with HiGHS, which is given the groups and limits alone."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import le
from subprocess import CalledProcessError

import numpy as np

from gac.allocation.decide import Decision
from gac.allocation.highs import minimise
from gac.allocation.knapsack import Group, Solution
from gac.allocation.knapsack.instance import costs_of
from gac.allocation.problem import Instance
from gac.core.errors import GacError
from gac.plan.plan import Certificate, Plan

logger = logging.getLogger("gac")

_NODES = 2_000
_TOLERANCE = 1e-6
"""Of HiGHS, for limits and an objective that are scaled to 1."""


@dataclass(frozen=True)
class CrossCheck:
    """Verdict of HiGHS on a choice.

    Attributes:
        least: loss of HiGHS's choice as an exact fraction of the checked one's; None where it has none.
        bound: HiGHS's lower bound, as such a fraction; None without one.
        nodes: of HiGHS's tree; None where it was not asked, since the choice loses nothing.
    """

    least: float | None
    bound: float | None
    nodes: int | None

    @property
    def verdict(self) -> str:
        within = f"(limits within {_TOLERANCE:g})"
        if self.nodes is None:
            return "a choice that loses nothing needs no second opinion"
        if self.least is not None and self.least < 1:
            return f"HiGHS found a choice that is better by {1 - self.least:.3g} of the sum, within the stated gap"
        if self.bound is None:
            return f"HiGHS found nothing better, and proved nothing in {self.nodes:,} nodes"
        if self.bound >= 1 - 2 * _TOLERANCE:
            return f"HiGHS agrees: it proved that none is better by {2 * _TOLERANCE:g} of the sum {within}"
        return f"HiGHS found nothing better, and proved that none is better by {1 - self.bound:.2g} of the sum {within}"


def crosscheck(groups: Sequence[Group], limits: Sequence[int], solution: Solution, nodes: int = _NODES) -> CrossCheck:
    """Sum a choice again, and search a better one with HiGHS.

    HiGHS computes in float64. Its choice counts only if its costs, summed in integers, keep the limits, and its
    losses, summed exactly, are less.

    Args:
        nodes: HiGHS stops after so many. They are counted, so the verdict is the same on every machine.

    Raises:
        GacError: the choice exceeds a limit, its loss is not the certificate's, or HiGHS found one that loses less than
            the certificate allows.
    """
    used, loss = _sums(groups, solution.choice)
    proof, unit = solution.certificate, Fraction(solution.unit)
    if not all(map(le, used, limits)):
        raise _defect(f"the checked choice uses {used}", f"at most {tuple(limits)}")
    if 2 * abs(loss - Fraction(proof.value)) >= unit:
        raise _defect(f"the checked choice loses {float(loss):.17g}", f"{proof.value:.17g}, as its certificate says")
    if loss == 0:
        return CrossCheck(1.0, 1.0, None)
    choice, bound, visited = _by_highs(groups, limits, loss, nodes)
    if choice is None:
        return CrossCheck(None, bound, visited)
    used, least = _sums(groups, choice)
    if not all(map(le, used, limits)):
        return CrossCheck(None, bound, visited)
    if 2 * (Fraction(proof.lower_bound) - least) >= unit:
        stated = f"HiGHS found a choice that loses {float(least):.17g}"
        raise _defect(stated, f"{proof.lower_bound:.17g} or more, as was proved")
    return CrossCheck(float(least / loss), bound, visited)


def _sums(groups: Sequence[Group], choice: Sequence[int]) -> tuple[tuple[int, ...], Fraction]:
    losses = (Fraction(group.values[item]) for group, item in zip(groups, choice, strict=True))
    return costs_of(groups, choice), sum(losses, Fraction())


def _by_highs(
    groups: Sequence[Group], limits: Sequence[int], loss: Fraction, nodes: int
) -> tuple[list[int] | None, float | None, int]:
    most, largest = np.array(limits, dtype=object), float(loss)
    items = [np.flatnonzero((group.costs <= most).all(axis=1) & (group.values <= largest)) for group in groups]
    values = np.concatenate([group.values[kept] for group, kept in zip(groups, items, strict=True)]) / largest
    costs = np.concatenate([group.costs[kept] for group, kept in zip(groups, items, strict=True)])
    group = np.repeat(np.arange(len(groups)), list(map(len, items)))
    scaled = costs.T / np.array([float(max(limit, 1)) for limit in limits])[:, None]
    try:
        taken, bound, visited = minimise(values, group, scaled, nodes, _TOLERANCE)
    except CalledProcessError as failure:
        words = (failure.stderr.strip().splitlines() or [f"exit status {failure.returncode}"])[-1]
        raise GacError(
            f"HiGHS broke off: {words}", "an answer", "Free memory, or leave out solve_again (--solve-again)."
        ) from None
    choice = None
    if taken is not None:
        parts = np.split(taken, np.flatnonzero(np.diff(group)) + 1)
        choice = [int(kept[part.argmax()]) for kept, part in zip(items, parts, strict=True)]
    if bound is not None:
        bound = None if bound > 1 + _TOLERANCE else min(bound, 1.0)  # the checked choice refutes a higher one
    return choice, bound, visited


def _defect(stated: str, expected: str) -> GacError:
    return GacError(stated, expected, "Report this as a defect of GAC, with the instance.")


def verified(decision: Decision) -> Plan:
    """Return the decision's plan after a cross-check of its instances; verdicts are logged and stored in it.

    For a plan of a rule, the exact choice behind its bound is checked.

    Raises:
        GacError: see ``crosscheck``.
    """
    plan, speed = decision.plan, decision.plan.speed
    of_bound = plan.certificate is not decision.solution.certificate
    proof = _checked(plan.certificate, decision.instance, decision.solution, "of its bound " if of_bound else "")
    if speed is not None and decision.faster is not None:
        speed = replace(speed, certificate=_checked(speed.certificate, *decision.faster, ""))
    return replace(plan, certificate=proof, speed=speed)


def _checked(proof: Certificate, instance: Instance, solution: Solution, subject: str) -> Certificate:
    logger.info("solving the same instance with HiGHS, in %s nodes at most", f"{_NODES:,}")
    record = crosscheck(instance.groups, list(instance.limits.values()), solution)
    verdict = f"{subject}{record.verdict}"
    logger.info("%s (%s nodes)", verdict, f"{record.nodes or 0:,}")
    return replace(proof, method=f"{proof.method}; {verdict}")
