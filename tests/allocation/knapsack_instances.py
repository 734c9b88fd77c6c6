"""Knapsack instances, and the answer by trying every choice."""

import itertools
import math

import numpy as np

from gac.allocation.knapsack import Group

KINDS = ("ties", "convex", "scales", "correlated", "huge", "staircase", "non-monotone", "single")


def random_instance(seed):
    """Up to 6 groups of up to 7 items and 3 limits, of every kind in turn; some are infeasible."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    count = int(rng.integers(1, 4))
    groups = [_group(f"g{number}", kind, count, rng) for number in range(int(rng.integers(1, 7)))]
    low = [sum(int(group.costs[:, limit].min()) for group in groups) for limit in range(count)]
    high = [sum(int(group.costs[:, limit].max()) for group in groups) for limit in range(count)]
    shares = rng.uniform(-0.1, 1.1, count)
    return groups, [math.floor(a + (b - a) * share) for a, b, share in zip(low, high, shares, strict=True)]


def _group(name, kind, limits, rng):
    items = 1 if kind == "single" and rng.random() < 0.5 else int(rng.integers(1, 8))
    largest = {"ties": 3, "convex": 20, "huge": 2**53, "staircase": 10, "single": 30}.get(kind, 10**6)
    costs = rng.integers(0, largest, (items, limits))
    values = rng.random(items)
    if kind == "ties":
        values = rng.integers(0, 4, items).astype(float)
    elif kind == "convex":
        costs, values = np.sort(costs, axis=0), np.sort(values)[::-1] ** 2
    elif kind == "scales":
        values *= 10.0 ** rng.integers(-12, 12)
    elif kind == "correlated":
        values = costs.sum(axis=1) / 7
    elif kind == "staircase":
        values = np.floor(values * 3) / 2
    if rng.random() < 0.2:
        costs[:, rng.integers(0, limits)] = 0
    return Group(name, values, costs)


def within(choice, groups, limits):
    rows = [group.costs[item].tolist() for group, item in zip(groups, choice, strict=True)]
    return all(sum(costs) <= limit for costs, limit in zip(zip(*rows, strict=True), limits, strict=True))


def brute_force(groups, limits):
    """The smallest sum of values within the limits, or None where there is no choice."""
    sums = (
        math.fsum(group.values[item] for group, item in zip(groups, choice, strict=True))
        for choice in itertools.product(*(range(len(group.values)) for group in groups))
        if within(choice, groups, limits)
    )
    return min(sums, default=None)


def curves(groups=30, items=24, limits=1, seed=0, kept=0.6):
    """Loss curves with noise, costs that rise together: like a model's."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(groups):
        first = np.sort(rng.integers(1, 10**6, items))
        others = [first * rng.uniform(0.5, 1) + rng.integers(0, 10**5, items) for _ in range(limits - 1)]
        values = rng.uniform(0.1, 3) * np.exp(-first / 10**6 * rng.uniform(1, 4)) + rng.uniform(0, 0.02, items)
        found.append(Group(f"g{number}", values, np.stack([first, *others], axis=1).astype(np.int64)))
    ends = [[(g.costs[:, at].min(), g.costs[g.values.argmin(), at]) for g in found] for at in range(limits)]
    return found, [int(sum(low + (high - low) * kept for low, high in pairs)) for pairs in ends]
