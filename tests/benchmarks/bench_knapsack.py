"""The exact knapsack beside HiGHS (gap 0) and CP-SAT (2 workers) on the same instances, in ms.

    python tests/benchmarks/bench_knapsack.py [--seconds 60] [--pairs 50] [--points 100]

Losses are synthetic: squared singular values that decay as those of a trained model do. Costs are exact.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np

from gac.allocation.knapsack import Group, Solution, knapsack
from gac.core.arrays import Floats
from gac.core.errors import BudgetError
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from tests.benchmarks.harness import machine, options
from tests.benchmarks.knapsack_peers import highs

T = TypeVar("T")
Instance = tuple[list[Group], list[int]]
Solver = Callable[[list[Group], list[int], float], str]
REPEATS = 5
PEERS_UP_TO = 500_000


def tails(rng: np.random.Generator, full: int) -> Floats:
    """What each number of squared singular values leaves out; they decay as those of a trained model do."""
    spectrum = np.exp(-np.arange(full) / full * rng.uniform(2, 6) + rng.normal(0, 0.3, full))
    return np.append(np.cumsum(np.sort(spectrum**2))[::-1], 0.0)


def llama(name: str, step: int, kept: float) -> Instance:
    """Every weight of a Llama, dense or at every multiple of ``step`` that saves parameters."""
    rng = np.random.default_rng(0)
    weights = [weight for site in family_of(SHAPES[name]).sites(SHAPES[name]) for weight in site.weights]
    groups = []
    for weight in weights:
        out, inside = weight.out_features, weight.in_features
        losses = tails(rng, min(out, inside)) * rng.uniform(1e-3, 1e-2)
        ranks = np.arange(step, (weight.params - 1) // (out + inside) + 1, step)
        costs = np.append(ranks * (out + inside), weight.params)
        groups.append(Group(weight.name, np.append(losses[ranks], 0.0), costs[:, None]))
    return groups, [int(kept * sum(weight.params for weight in weights))]


def noisy(
    count: int, items: int, limits: int = 1, kept: tuple[float, ...] = (0.5, 0.5), staircase: bool = False
) -> Instance:
    """Losses that fall with the first cost, with noise; further costs follow the first. Values are not concave."""
    rng = np.random.default_rng(1)
    groups = []
    for at in range(count):
        first = np.sort(rng.integers(1, 10**6, items))
        others = [first * rng.uniform(0.3, 1) + rng.integers(0, 2 * 10**5, items) for _ in range(limits - 1)]
        costs = np.stack([first, *others], axis=1).astype(np.int64)
        costs = costs // 65536 * 65536 + 65536 if staircase else costs
        values = rng.uniform(0.1, 3) * np.exp(-first / 10**6 * rng.uniform(1, 4)) + rng.uniform(0, 0.02, items)
        groups.append(Group(str(at), values, costs))
    low = [sum(int(group.costs[:, at].min()) for group in groups) for at in range(limits)]
    high = [sum(int(group.costs[group.values.argmin(), at]) for group in groups) for at in range(limits)]
    return groups, [int(a + (b - a) * share) for a, b, share in zip(low, high, kept, strict=False)]


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what came of it."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def solved(solve: Solver, instance: Instance, seconds: float, repeats: int = 1) -> tuple[float, str]:
    """Median ms and what the solver said."""
    samples = [timed(partial(solve, *instance, seconds)) for _ in range(repeats)]
    return 1e3 * statistics.median(sample for sample, _ in samples), samples[-1][1]


def ours(groups: list[Group], limits: list[int], seconds: float) -> str:
    proof = knapsack(groups, limits, work_limit=seconds).certificate
    return f"{proof.status} {proof.value:.9g}"


def by_highs(groups: list[Group], limits: list[int], seconds: float) -> str:
    found = highs(groups, limits, seconds)
    return f"{'optimal' if found.status == 0 else 'unproved'} {found.fun if found.x is not None else float('nan'):.9g}"


def cp_sat(groups: list[Group], limits: list[int], seconds: float) -> str:
    """Losses as integers with 40 bits in all, which CP-SAT digests more easily than our 52."""
    from ortools.sat.python import cp_model

    unit = 2.0**-40 * sum(float(group.values.max()) for group in groups)
    model = cp_model.CpModel()
    picks = [[model.new_bool_var("") for _ in group.values] for group in groups]
    flat = [pick for group_picks in picks for pick in group_picks]
    for group_picks in picks:
        model.add_exactly_one(group_picks)
    for at, limit in enumerate(limits):
        costs = np.concatenate([group.costs[:, at] for group in groups]).tolist()
        model.add(cp_model.LinearExpr.weighted_sum(flat, costs) <= limit)
    values = np.concatenate([group.values for group in groups])
    model.minimize(cp_model.LinearExpr.weighted_sum(flat, np.rint(values / unit).astype(np.int64).tolist()))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return solver.status_name(status).lower()
    chosen = values[[bool(solver.boolean_value(pick)) for pick in flat]]
    return f"{'optimal' if status == cp_model.OPTIMAL else 'unproved'} {chosen.sum():.9g}"


def instances() -> Iterator[tuple[str, Instance]]:
    for name, step in (("Llama-3-8B", 64), ("Llama-3-8B", 8), ("Llama-3-70B", 8)):
        for kept in (0.9, 0.8, 0.6):
            yield f"{name}, multiples of {step}, kept {kept}", llama(name.lower(), step, kept)
    yield "2,000 groups of 64", noisy(2000, 64)
    yield "80 groups of 16, staircase costs", noisy(80, 16, staircase=True)
    yield "30 groups of 50,000, two limits", noisy(30, 50_000, 2)


def limit_pairs(count: int, seconds: float) -> None:
    """Params and latency together: 224 groups of 32 at many pairs of limits."""
    spent: dict[str, list[float]] = {"ours": [], "HiGHS": []}
    shares = np.random.default_rng(2).uniform(0.2, 0.9, (count, 2))
    for pair in shares:
        instance = noisy(224, 32, 2, tuple(pair))
        try:
            took, said = solved(ours, instance, seconds)
        except BudgetError:
            continue
        peer, peer_said = solved(by_highs, instance, seconds)
        spent["ours"].append(took)
        spent["HiGHS"].append(peer)
        if not said.startswith("optimal") or not peer_said.startswith("optimal"):
            print(f"  {pair.round(3)}: ours {said}, HiGHS {peer_said}")
    print(f"\n224 groups of 32, two limits, {len(spent['ours'])} pairs of limits, ms")
    for name, samples in spent.items():
        print(f"  {name:6} median {statistics.median(samples):9.1f}  largest {max(samples):9.1f}")


def many_budgets(points: int) -> None:
    """Llama-3-8B, every multiple of 64, one exact solve a budget from 0.3 to 1.0."""
    groups, (total,) = llama("llama-3-8b", 64, 1.0)

    def every_budget() -> list[Solution]:
        return [knapsack(groups, [int(kept * total)]) for kept in np.linspace(0.3, 1.0, points)]

    runs = [timed(every_budget) for _ in range(REPEATS)]
    spent, proved = [taken for taken, _ in runs], sum(one.certificate.status == "optimal" for one in runs[-1][1])
    print(f"\nLlama-3-8B, multiples of 64, {points} budgets from 0.3 to 1.0: {proved} proved optimal")
    print(f"  all {points}: median {statistics.median(spent):.2f} s of {REPEATS} (shortest {min(spent):.2f} s)")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of each peer and instance")
    parser.add_argument("--pairs", type=int, default=50, help="how many pairs of limits")
    parser.add_argument("--points", type=int, default=100, help="how many budgets in a row")
    given = parser.parse_args()
    print(machine())
    print(f"{'instance':40}{'items':>11}{'ours ms':>11}{'HiGHS ms':>11}{'CP-SAT ms':>11}   status and loss of each")
    for name, instance in instances():
        items = sum(len(group.values) for group in instance[0])
        results = [solved(ours, instance, given.seconds, REPEATS)]
        if items <= PEERS_UP_TO:
            results += [solved(peer, instance, given.seconds) for peer in (by_highs, cp_sat)]
        times = "".join(f"{ms:11.1f}" for ms, _ in results)
        print(f"{name:40}{items:11,}{times}   {'; '.join(said for _, said in results)}", flush=True)
    limit_pairs(given.pairs, given.seconds)
    many_budgets(given.points)


if __name__ == "__main__":
    main()
