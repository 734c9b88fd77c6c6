"""Extreme instances of the knapsack beside every choice in exact integers: ``python -m tests.fuzz.knapsack``.

Losses from subnormal to 1e308, ties and zeros, costs up to ``2**63 - 1``, one to four limits. Of each answer is asked
what ``knapsack`` promises: no exception but a GacError, no limit broken, and no value, nor any bound, that exceeds the
least loss by half a unit; of a refusal, that there is no choice, and by how much the limit falls short.

It ends at the first number of instances or seconds that is reached. What fails is printed with the seed and as Python,
and makes it exit with 1.
"""

import argparse
import math
import random
import re
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import product

from gac.allocation.knapsack import Group, Solution, knapsack
from gac.core.errors import BudgetError, GacError

Items = list[tuple[float, list[int]]]
Instance = tuple[list[Items], list[int]]
LARGEST = 2**63 - 1
FINE = 2**1074
"""Every float is a whole number of as many parts of 1."""


def random_instance(draw: random.Random) -> Instance:
    """Up to 5 groups of 5 items, each number of one of a few kinds that the instance has; limits near what is taken."""
    rows = draw.choice([1, 1, 1, 2, 2, 3, 4])
    losses, costs = (draw.sample(kinds, draw.choice([1, 1, 2, 3])) for kinds in (LOSSES, COSTS))
    groups = [
        [
            (draw.choice(losses)(draw), [min(draw.choice(costs)(draw), LARGEST) for _ in range(rows)])
            for _ in range(draw.randint(1, 4))
        ]
        for _ in range(draw.randint(1, 5))
    ]
    for items in groups:
        items.extend(draw.sample(items, 1) if draw.random() < 0.2 else [])
    return groups, [_limit([[costs[row] for _, costs in items] for items in groups], draw) for row in range(rows)]


LOSSES = (
    lambda draw: 0.0,
    lambda draw: float(draw.randint(0, 3)),
    lambda draw: draw.random(),
    lambda draw: draw.randint(0, 5) * 2.0**-1074,
    lambda draw: draw.random() * 1e-307,
    lambda draw: draw.random() * 10.0 ** draw.randint(-300, 300),
    lambda draw: 1e18 + draw.randint(0, 4) * 128,
    lambda draw: 1.0 + draw.randint(0, 4) * 2.0**-52,
    lambda draw: draw.choice([1e308, sys.float_info.max, 3e307]),
    lambda draw: draw.choice([1e15, 1e18, 1e30, 1e300]) if draw.random() < 0.3 else float(draw.randint(0, 20)),
)
COSTS = (
    lambda draw: 0,
    lambda draw: draw.randint(0, 9),
    lambda draw: draw.randint(0, 10**6) * 36,
    lambda draw: draw.randint(0, 1) << 62,
    lambda draw: (1 << 62) + draw.randint(-3, 3),
    lambda draw: draw.randint(0, LARGEST),
    lambda draw: draw.randint(0, 1 << 53),
)


def _limit(columns: list[list[int]], draw: random.Random) -> int:
    """The cost of some choice, or one more or less; or anything from the least to the most; or a number far away."""
    if draw.random() < 0.6:
        return sum(map(draw.choice, columns)) + draw.choice([0, 0, 0, 1, -1])
    if draw.random() < 0.9:
        return draw.randint(sum(map(min, columns)), sum(map(max, columns)))
    return draw.choice([1 << 64, 1 << 200, 0, -1])


def fault(instance: Instance) -> str:
    """'' or what is wrong with the answer to it."""
    rows, limits = instance
    groups = [
        Group(str(index), [loss for loss, _ in items], [costs for _, costs in items])
        for index, items in enumerate(rows)
    ]
    answer: Solution | GacError
    try:
        answer = knapsack(groups, limits)
    except GacError as refused:
        answer = refused
    except Exception as failure:  # noqa: BLE001  # that there is none is what is tested
        return f"{type(failure).__name__}: {failure}"
    choices = list(product(*rows))
    taken = [[sum(column) for column in zip(*(costs for _, costs in choice), strict=True)] for choice in choices]
    within = [all(map(int.__le__, used, limits)) for used in taken]
    if isinstance(answer, BudgetError):
        return _wrong_refusal(answer, taken, limits) if not any(within) else f"refused: {answer}"
    lost = [sum(_fine(loss) for loss, _ in choice) for choice, fits in zip(choices, within, strict=True) if fits]
    if isinstance(answer, GacError):
        return "" if lost and min(lost) > _fine(sys.float_info.max) else f"refused: {answer}"
    return _wrong_answer(answer, rows, limits, min(lost, default=None))


def _fine(value: float) -> int:
    up, down = value.as_integer_ratio()
    return up * (FINE // down)


def _wrong_refusal(refused: BudgetError, taken: list[list[int]], limits: list[int]) -> str:
    """Short is the first limit that cannot be met alone, or failing that the first beside those before it."""
    amount = re.search(r"^limit (\d+) .* it falls short by (at least )?(\d+)$", refused.given)
    if amount is None:
        return f"no amount: {refused}"
    alone = [min(column) - limit for column, limit in zip(zip(*taken, strict=True), limits, strict=True)]
    row = next((row for row, short in enumerate(alone) if short > 0), None)
    if row is None:
        within_earlier = [
            [used for used in taken if all(map(int.__le__, used[:row], limits[:row]))] for row in range(5)
        ]
        row = next(row for row, limit in enumerate(limits) if min(used[row] for used in within_earlier[row]) > limit)
        short = min(used[row] for used in within_earlier[row]) - limits[row]
    else:
        short = alone[row]
    right = 0 < int(amount[3]) <= short if amount[2] else int(amount[3]) == short
    return "" if int(amount[1]) == row + 1 and right else f"limit {row + 1} is short by {short}, not as said: {refused}"


def _wrong_answer(answer: Solution, rows: list[Items], limits: list[int], least: int | None) -> str:
    proof, unit = answer.certificate, _fine(answer.unit)
    chosen = [items[item] for items, item in zip(rows, answer.choice, strict=True)]
    used = tuple(sum(column) for column in zip(*(costs for _, costs in chosen), strict=True))
    lost = sum(_fine(loss) for loss, _ in chosen)
    if least is None or used != answer.used or not all(map(int.__le__, used, limits)):
        return f"limit broken: {answer}"
    floor = sum(min(_fine(loss) for loss, _ in items) for items in rows)
    checks = {
        "not proved": proof.status == "optimal" and proof.lower_bound == proof.value and proof.gap == 0,
        "value": proof.value == math.fsum(loss for loss, _ in chosen),
        "not the least": 2 * (lost - least) < unit,
        "bound above the least": 2 * (_fine(proof.lower_bound) - least) < unit,
        "multipliers": all(math.isfinite(multiplier) and multiplier >= 0 for multiplier in proof.multipliers),
        "coarse unit": unit <= max(64, 8 * _fine(math.ulp(proof.value)), least - floor >> 30),
    }
    wrong = [name for name, right in checks.items() if not right]
    return f"{', '.join(wrong)}: {answer}" if wrong else ""


def as_python(instance: Instance) -> str:
    rows, limits = instance
    groups = (
        f'Group("{index}", {[loss for loss, _ in items]}, {[costs for _, costs in items]})'
        for index, items in enumerate(rows)
    )
    return f"knapsack([{', '.join(groups)}], {limits})"


def faults(seed: int, instances: int, seconds: float = math.inf) -> Iterator[tuple[int, str]]:
    """Number of the instance and what is wrong with it ('' where nothing is); what NumPy warns of is wrong too."""
    began = time.monotonic()
    for number in range(instances):
        if time.monotonic() - began > seconds:
            return
        instance = random_instance(random.Random(f"{seed}/{number}"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrong = fault(instance)
        yield number, f"{wrong}\n    {as_python(instance)}" if wrong else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="drawn and printed by default")
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    print(f"knapsack: seed {options.seed}", flush=True)
    began, number, wrong_answers = time.monotonic(), -1, 0
    for number, wrong in faults(options.seed, options.instances, options.seconds):
        if wrong:
            wrong_answers += 1
            print(f"FOUND by --seed {options.seed}, instance {number}: {wrong}", flush=True)
    print(f"{number + 1:,} instances in {time.monotonic() - began:.0f} s, {wrong_answers} wrong")
    if wrong_answers:
        print(f"A DEFECT OF THE KNAPSACK: python -m tests.fuzz.knapsack --seed {options.seed} finds it again.")
    sys.exit(bool(wrong_answers))


if __name__ == "__main__":
    main()
