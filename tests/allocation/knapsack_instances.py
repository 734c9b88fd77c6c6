"""Knapsack instances, and the answer by trying every choice."""

import math
import re
from dataclasses import replace

import numpy as np

from gac.allocation.knapsack import Group, Solution, knapsack
from gac.allocation.knapsack.instance import to_grains
from gac.core.errors import BudgetError

FAULTS = ("value", "limit broken", "feasibility", "not proved", "peer not proved")

KINDS = (
    "concave",
    "staircase",
    "non-monotone",
    "ties",
    "one candidate",
    "zero costs",
    "huge costs",
    "infeasible",
    "several limits",
    "scales",
    "correlated",
    "divisors",
)


def random_instance(seed, groups=6, items=7, kind=None):
    """1 to 4 limits, up to as many groups and items as given, of every kind in turn; some of each are infeasible."""
    rng = np.random.default_rng(seed)
    kind = kind or KINDS[seed % len(KINDS)]
    limits = int(rng.integers(2, 5) if kind == "several limits" else rng.choice([1, 1, 1, 2, 2, 3, 4]))
    result = [
        _group(f"g{index}", kind, limits, items, rng) for index in range(int(rng.integers(groups // 6, groups + 1)))
    ]
    if kind == "infeasible":
        return result, _just_too_little(result, limits, rng)
    low, high = (np.array([end(group.costs, axis=0) for group in result]).sum(axis=0) for end in (np.min, np.max))
    if rng.random() < 0.3:
        return result, sum(group.costs[rng.integers(len(group.values))] for group in result).tolist()
    shares = rng.uniform(-0.05, 1.1, limits)
    return result, [math.floor(a + (b - a) * share) for a, b, share in zip(low, high, shares, strict=True)]


def _just_too_little(groups, limits, rng):
    """One limit 1 short alone, or the last one short beside the others (such groups trade one cost for another)."""
    total = np.array([group.costs.min(axis=0) for group in groups]).sum(axis=0)
    largest = int(sum(group.costs.max() for group in groups))
    most = [largest] * limits
    if limits == 1 or rng.random() < 0.5:
        index = int(rng.integers(limits))
        most[index] = int(total[index]) - 1
    else:
        most[0] = int(rng.integers(total[0], largest + 1))
        most[-1] = sum(int(group.costs[0, [0, -1]].sum()) for group in groups) - most[0] - 1
    return most


def _group(name, kind, limits, most, rng):
    items = 1 if kind == "one candidate" and rng.random() < 0.5 else int(rng.integers(max(1, most // 3), most + 1))
    largest = {"ties": 3, "huge costs": 2**53, "staircase": 10, "one candidate": 30}.get(kind, 10**6)
    costs = rng.integers(0, largest, (items, limits))
    values = rng.random(items)
    if kind == "ties":
        values = rng.integers(0, 4, items).astype(float)
    elif kind == "concave":
        costs = np.sort(costs, axis=0)
        values = np.cumsum(np.sort(rng.random(items)))[::-1].copy()
    elif kind == "scales":
        values *= 10.0 ** rng.integers(-12, 12)
    elif kind == "correlated":
        values = (2 * 10**6 * limits - costs.sum(axis=1)) / 7
    elif kind == "staircase":
        values = np.floor(values * 3) / 2
    elif kind == "infeasible" and limits > 1:
        costs[:, -1] = 10**6 - costs[:, 0]
    elif kind == "divisors":
        costs = rng.integers(0, 10**3) + rng.choice([1, 4, 9, 16, 36, 36, 36]) * np.sort(
            rng.integers(0, 60, (items, limits)), axis=0
        )
        values = np.sort(values)[::-1] / rng.integers(1, 30)
    if kind == "zero costs":
        costs[rng.random(costs.shape) < 0.7] = 0
        costs[:, rng.integers(limits)] *= rng.integers(2)
    return Group(name, values, costs)


def within(choice, groups, limits):
    rows = [group.costs[item].tolist() for group, item in zip(groups, choice, strict=True)]
    return all(sum(costs) <= limit for costs, limit in zip(zip(*rows, strict=True), limits, strict=True))


def every_sum(columns):
    """The sums of every choice: one column of entries a group."""
    total = np.zeros(1, columns[0].dtype)
    for column in columns:
        total = np.add.outer(total, column).ravel()
    return total


def fitting(groups, limits):
    """Which of all choices are within the limits."""
    fits = True
    for index, limit in enumerate(limits):
        fits = fits & (every_sum([group.costs[:, index] for group in groups]) <= limit)
    return fits


def curves(groups=30, items=24, limits=1, seed=0, kept=0.6):
    """Loss curves with noise, costs that rise together: like a model's."""
    rng = np.random.default_rng(seed)
    result = []
    for number in range(groups):
        first = np.sort(rng.integers(1, 10**6, items))
        others = [first * rng.uniform(0.5, 1) + rng.integers(0, 10**5, items) for _ in range(limits - 1)]
        values = rng.uniform(0.1, 3) * np.exp(-first / 10**6 * rng.uniform(1, 4)) + rng.uniform(0, 0.02, items)
        result.append(Group(f"g{number}", values, np.stack([first, *others], axis=1).astype(np.int64)))
    ends = [[(g.costs[:, index].min(), g.costs[g.values.argmin(), index]) for g in result] for index in range(limits)]
    return result, [int(sum(low + (high - low) * kept for low, high in pairs)) for pairs in ends]


# --- faults ---------------------------------------------------------------------------------------------------------


def fault(groups, limits, peer=None):
    """'' or one of ``FAULTS``, beside a peer of ``tests.benchmarks.knapsack_peers``, or by trying every choice."""
    peer = peer or brute_force_finds
    try:
        solution = knapsack(groups, limits)
    except BudgetError as error:
        return peer(groups, limits, error)
    if not within(solution.choice, groups, limits):
        return "limit broken"
    if (solution.certificate.status, solution.certificate.gap) != ("optimal", 0.0):
        return "not proved"
    value = math.fsum(group.values[item] for group, item in zip(groups, solution.choice, strict=True))
    return "value" if value != solution.certificate.value else peer(groups, limits, solution)


def brute_force_finds(groups, limits, answer):
    """Every choice, in the integers that the knapsack compares; of an infeasible instance also the shortfall."""
    fits = fitting(groups, limits)
    if not isinstance(answer, Solution):
        return "feasibility" if fits.any() or _shortfall(groups, limits) != _said(answer) else ""
    columns = in_grains(groups, limits, answer.grain)
    value = sum(int(column[item]) for column, item in zip(columns, answer.choice, strict=True))
    return "" if value == every_sum(columns)[fits].min() else "value"


def in_grains(groups, limits, grain):
    """Losses above the smallest in the group that fits beside the cheapest of every other group."""
    cheapest = np.array([group.costs.min(axis=0) for group in groups])
    room = [limit - sum(row) for limit, row in zip(limits, cheapest.T.tolist(), strict=True)]
    columns = []
    for group, low in zip(groups, cheapest, strict=True):
        above = np.maximum(group.values - group.values[(group.costs - low <= room).all(axis=1)].min(), 0)
        columns.append(np.minimum(to_grains(above, grain), 2**56))
    return columns


def _shortfall(groups, limits):
    """By how much the first limit that cannot be met alone, or failing that beside the earlier ones, falls short."""
    sums = [every_sum([group.costs[:, index] for group in groups]) for index in range(len(limits))]
    for used, limit in zip(sums, limits, strict=True):
        if used.min() > limit:
            return int(used.min()) - limit
    for index in range(1, len(limits)):
        least = int(sums[index][fitting([replace(g, costs=g.costs[:, :index]) for g in groups], limits[:index])].min())
        if least > limits[index]:
            return least - limits[index]
    return 0


def _said(error):
    result = re.search(r"it falls short by (\d+)$", error.given)
    return int(result[1]) if result else None
