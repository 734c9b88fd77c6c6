"""Random instances of the knapsack, each compared with brute force, CP-SAT or HiGHS; exits 1 on any difference.

    python tests/benchmarks/knapsack_agreement.py [--instances 10000] [--seed 0]
    python tests/benchmarks/knapsack_agreement.py --medium --instances 300

Most are small (up to 6 groups of 7 items) and are compared with every choice there is, exactly, in the integers
that the knapsack compares; infeasible ones also by how much they fall short. One in five (up to 30 groups of 12) is
compared with CP-SAT, in the same integers, and where costs and losses are of a size that its tolerances (1e-6) can tell
apart, every other one with HiGHS at gap 0. Losses that are a sum of the costs (``correlated``) stay small: large ones
are beyond every solver. A peer that ends without a proof is counted, but is no difference.

``--medium`` compares with HiGHS alone, at gap 0: up to 50 groups of 20, and every tenth time 80 layers of 16 variants
(4 of attention by 4 of the MLP) under two limits, as in a search for an architecture (Puzzle, arXiv 2411.19146).
"""

import sys
import time
from collections import Counter

import numpy as np
from tqdm import tqdm

from gac.allocation.knapsack import Group
from tests.allocation.knapsack_instances import FAULTS, KINDS, fault, random_instance
from tests.benchmarks.harness import options
from tests.benchmarks.knapsack_peers import cp_sat_finds, highs_finds

LARGE_EVERY = 5
NOT_FOR_HIGHS = ("huge costs", "scales")
FOR_HIGHS = [kind for kind in KINDS if kind not in (*NOT_FOR_HIGHS, "correlated")]


def layers(seed, count=80, attention=4, mlps=4):
    """Layers that each take one of 16 variants, of the same bytes and ns in all of them; losses are the layer's own."""
    rng = np.random.default_rng(seed)
    kept = [np.sort(rng.integers(0, 10**4, (variants, 2)), axis=0)[::-1] for variants in (attention, mlps)]
    costs = 64 * (kept[0][:, None] + kept[1]).reshape(-1, 2)
    result = []
    for index in range(count):
        lost = [np.append(0, np.cumsum(rng.exponential(rng.uniform(0.001, 0.01), len(each) - 1))) for each in kept]
        values = np.add.outer(*lost).ravel() * rng.uniform(0.9, 1.1, attention * mlps)
        result.append(Group(f"layer {index}", values, costs))
    share = rng.uniform(0.4, 0.9, 2)
    return result, (count * (costs.min(axis=0) + share * np.ptp(costs, axis=0))).astype(int).tolist()


def compared_at_medium_size(seed: int) -> tuple[str, str, str]:
    """Likewise, beside HiGHS."""
    if seed % 10 == 0:
        return "layers", "HiGHS", fault(*layers(seed), highs_finds)
    kind = FOR_HIGHS[seed % len(FOR_HIGHS)]
    return kind, "HiGHS", fault(*random_instance(seed, groups=50, items=20, kind=kind), highs_finds)


def compared(seed: int) -> tuple[str, str, str]:
    """The instance's kind, its peer and what differs ('' where nothing does)."""
    kind, turn = KINDS[seed % len(KINDS)], seed // len(KINDS)
    if turn % LARGE_EVERY or kind == "correlated":
        return kind, "brute force", fault(*random_instance(seed))
    instance = random_instance(seed, groups=30, items=12)
    if turn // LARGE_EVERY % 2 and kind not in NOT_FOR_HIGHS:
        return kind, "HiGHS", fault(*instance, highs_finds)
    return kind, "CP-SAT", fault(*instance, cp_sat_finds)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first instance's")
    parser.add_argument("--medium", action="store_true", help="beside HiGHS alone, larger ones")
    given = parser.parse_args()
    compare = compared_at_medium_size if given.medium else compared
    began, counts = time.monotonic(), Counter[tuple[str, str]]()
    for seed in tqdm(range(given.seed, given.seed + given.instances)):
        kind, peer, differs = compare(seed)
        counts.update([(kind, peer), (kind, differs)])
        if differs:
            tqdm.write(f"seed {seed}, {kind}, {peer}: {differs}")
    columns = ("brute force", "CP-SAT", "HiGHS", *FAULTS)
    kinds = (*KINDS, "layers")
    print(f"{'kind':16}" + "".join(f"{column:>16}" for column in columns))
    for kind in kinds:
        print(f"{kind:16}" + "".join(f"{counts[kind, column]:16,}" for column in columns))
    print(f"{given.instances:,} instances in {time.monotonic() - began:.0f} s")
    sys.exit(
        any(
            counts[kind, differs] for kind in (*KINDS, "layers") for differs in FAULTS if not differs.startswith("peer")
        )
    )


if __name__ == "__main__":
    main()
