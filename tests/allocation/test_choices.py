"""Choices beside all that there are: the least loss, the fastest within the slack, and laws that all of them keep."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import fsum
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gac.allocation.crosscheck import verified
from gac.allocation.decide import Decision, decide
from gac.allocation.feasibility import check_reachable
from gac.allocation.knapsack import Solution, knapsack
from gac.allocation.problem import Problem, as_knapsack
from gac.allocation.resolve import speed_defaults
from gac.core.arrays import Ints
from gac.core.errors import BudgetError
from gac.core.operations import Operation
from gac.forms import form_named
from gac.plan.costs import BYTES, COSTS, PARAMS, floored, ns_of
from gac.plan.plan import AnyLatency, Plan
from gac.plan.recipe import Recipe
from gac.profiling.table import Profile
from gac.schemes import scheme_named
from tests.allocation.small_problems import DECODE, PREFILL, SIDE, asking, problem, profile, rows
from tests.reporting.report_plans import rounding

SITES, RANKS = 3, 5


def _random(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    losses = -np.sort(-rng.integers(0, 30, (SITES, RANKS)) * 0.01, axis=1)
    return problem(losses.tolist(), rng.integers(1, 40, RANKS + 1).tolist())


def _open(of: Problem, budget: float, **options: object) -> Problem:
    asked = asking(of, budget, **options)
    return replace(asked, recipe=speed_defaults(asked.recipe, asked.sites, asked.profile))


def _every_choice(of: Problem) -> list[tuple[int, float, tuple[int, ...]]]:
    """Parameters, loss and ns of each."""
    everything = replace(of, recipe=replace(of.recipe, space=replace(of.recipe.space, align=False)))
    sets = everything.candidates(["params", f"ns:{PREFILL}", f"ns:{DECODE}", "kv_numbers"])
    result = []
    for items in product(*(range(len(of_site)) for of_site in sets)):
        taken = [of_site.candidate(item) for of_site, item in zip(sets, items, strict=True)]
        ns = tuple(map(sum, zip(*(each.latency_ns for each in taken), strict=True)))
        result.append((sum(each.params for each in taken), fsum(each.loss for each in taken), ns))
    return result


def test_nothing_within_the_limits_and_the_slack_is_faster() -> None:
    for seed in range(24):
        of = _random(seed)
        budget, slack = [0.4, 0.6, 0.8][seed % 3], [0.01, 0.1, 0.5, 1.0][seed % 4]
        asked = _open(of, budget, slack=slack, latency="any" if seed % 2 else None)
        dense = [ns for ns in asked.dense.latency_ns if ns]
        most = dense if seed % 2 == 0 else [10**9] * 2
        limit = int(budget * asked.params + 1e-9)
        allowed = [each for each in _every_choice(of) if each[0] <= limit and all(map(int.__le__, each[2], most))]
        if not allowed:
            with pytest.raises(BudgetError):
                decide(asked)
            continue
        plan = decide(asked).plan
        least = min(loss for _, loss, _ in allowed)
        assert plan.speed is not None
        assert plan.speed.loss == plan.certificate.value == pytest.approx(least, abs=1e-12)
        assert plan.prediction.loss <= least * (1 + slack) + 1e-12
        fastest = min(
            sum(ns / full for ns, full in zip(taken, dense, strict=True))
            for _, loss, taken in allowed
            if loss <= least * (1 + slack) - 1e-12 or loss <= least
        )
        proof = plan.speed.certificate
        assert proof.status == "optimal"
        assert proof.value <= fastest + 1e-12
        assert proof.value == pytest.approx(sum(each.plan_ns / each.dense_ns for each in plan.workloads))


def _losing() -> Problem:
    """The least loss at 0.8 takes slow ranks; hardly more loss takes fast ones."""
    return problem([[0.5, 0.4, 0.3, 0.2, 0.01]] * SITES, [1, 2, 3, 4, 9, 6], workloads=[PREFILL])


def test_no_workload_is_slower_than_dense_unless_asked() -> None:
    free = decide(_open(_losing(), 0.8, latency="any", slack=0)).plan
    kept = decide(_open(_losing(), 0.8, slack=0)).plan
    assert free.recipe.limits.latency == {}
    assert kept.recipe.limits.latency == {PREFILL: 1.0}
    assert free.any_latency is None
    assert kept.any_latency == AnyLatency(free.certificate.value, tuple(timed.plan_ns for timed in free.workloads))
    times = ", ".join(f"{timed.plan_ns / timed.dense_ns:.3f}x dense at {timed.workload}" for timed in free.workloads)
    instead = f"{free.certificate.value:.4f} in place of {kept.certificate.value:.4f}"
    assert f"limits       latency binds. With --latency any the loss is {instead}, at {times}" in kept.summary()
    unknown = replace(kept, any_latency=AnyLatency(free.certificate.value, (None,) * len(times.split(", "))))
    assert f"{instead}, at an unknown latency" in unknown.summary()
    assert "limits       no latency is limited" in free.summary()
    slower = [[each.plan_ns > each.dense_ns for each in plan.workloads] for plan in (free, kept)]
    assert any(slower[0])
    assert not any(slower[1])


def test_a_latency_that_stays_is_no_change_in_the_summary() -> None:
    plan = decide(_open(_losing(), 0.8, slack=0.5)).plan
    (timed,), (least,) = plan.workloads, plan.speed.latency_ns
    line = f"nats above the least loss: {least / timed.dense_ns:.3f}x becomes {timed.plan_ns / timed.dense_ns:.3f}x at "
    assert line in plan.summary()
    same = replace(plan, speed=replace(plan.speed, latency_ns=(timed.plan_ns,))).summary()
    assert "nats above the least loss: no latency changes by a thousandth of the dense model's (optimal, gap 0)" in same
    assert "becomes" not in same


def test_both_proofs_are_checked() -> None:
    decision: Decision = decide(_open(_losing(), 0.8, slack=0.5))
    plan: Plan = verified(decision)
    assert plan.speed is not None
    assert all("HiGHS agrees" in proof.method for proof in (plan.certificate, plan.speed.certificate))


def test_a_budget_that_is_only_kept_slower_names_the_smallest_that_is_not() -> None:
    asked = _open(problem([[0.5, 0.3, 0.2, 0.1, 0.0]] * SITES, [20, 20, 20, 20, 9, 10], workloads=[PREFILL]), 0.7)
    with pytest.raises(BudgetError, match=r"no workload slower than the dense model; expected at least \d+") as raised:
        check_reachable(asked.sites, asked.recipe, asked.profile)
    least = float(str(raised.value).partition("Ask for a budget of ")[2].split()[0])
    fitting = _open(asked, least)
    check_reachable(fitting.sites, fitting.recipe, fitting.profile)
    assert decide(fitting).plan.budget.kept == pytest.approx(least, abs=1e-6)


LIMITS = [(BYTES,), (BYTES, ns_of(PREFILL)), (BYTES, ns_of(PREFILL), PARAMS)]


class Faster(Profile):
    """A table of 16-bit numbers in which GEMMs of fewer bits take 7 ns less."""

    def latency(self, operator: str, fixed: Any, axis: str, dims: Ints, dtype: str = "bf16") -> tuple[Ints, Any]:
        ns, known = super().latency(operator, fixed, axis, dims)
        return ns - 7 * (dtype != "bf16"), known

    def point(self, operation: Operation, dtype: str = "bf16") -> int | None:
        ns = super().point(operation)
        return None if ns is None else ns - 7 * (dtype != "bf16")


def timed() -> Problem:
    """Two sites whose numbers have 16 or 4 bits, with latencies of both."""
    of = rounding(budget=1.0)
    table = of.profile
    faster = Faster(table.path, table.header, table.measurements, table.digest, table.sentinels)
    return replace(of, profile=faster)


@pytest.mark.parametrize("columns", LIMITS)
@pytest.mark.parametrize("share", [0.3, 0.4, 0.5, 0.75])
def test_no_form_dim_and_scheme_is_better(columns: Sequence[str], share: float) -> None:
    """Against every choice that there is, counted by hand, before any candidate is left out."""
    of = timed()
    limits = {column: floored(share, of.dense.amount(column)) for column in columns}
    solution = as_knapsack(of.candidates(limits), limits).solve()
    options = [[_counted(of, site.weights[0], *each) for each in CHOICES] for site in of.sites]
    within = [
        fsum(loss for loss, _ in chosen)
        for chosen in product(*options)
        if all(sum(costs[column] for _, costs in chosen) <= most for column, most in limits.items())
    ]
    assert solution.certificate.status == "optimal"
    assert solution.certificate.value == pytest.approx(min(within), rel=1e-12)


CHOICES = [
    (form, scheme, dim)
    for scheme in ("bf16", "w4a16")
    for form, dims in (("low_rank", range(1, 6)), ("dense", [SIDE]))
    for dim in dims
]


def _counted(of: Problem, weight, name: str, scheme: str, dim: int):  # type: ignore[no-untyped-def]
    """Loss and costs of one weight."""
    form, stored = form_named(name), scheme_named(scheme)
    curve = of.curves.of(form, weight, scheme)
    ns = (10 * dim if name == "low_rank" else 60) - (7 if scheme == "w4a16" else 0)
    costs = {column: cost.of_choice(form, stored, weight, dim) for column, cost in COSTS.items()}
    return 0.0 if curve is None else float(curve.loss[dim]), costs | {ns_of(PREFILL): ns}


LATENCIES = [10, 20, 30, 40, 50, 60]
# Halves and whole numbers, so that sums of losses are exact in any order.
ROWS = st.lists(
    st.lists(st.integers(0, 200).map(lambda half: half / 2), min_size=5, max_size=5).map(
        lambda row: sorted(row, reverse=True)
    ),
    min_size=1,
    max_size=6,
)
BUDGETS = st.floats(0.2, 1.0)


def planned(losses: Sequence[Sequence[float]], budget: float, latency: dict[str, float] | None = None) -> Plan:
    return decide(asking(problem(losses, LATENCIES), budget, latency=latency or {})).plan


@given(ROWS, BUDGETS, BUDGETS)
def test_more_budget_never_predicts_more_loss(losses: list[list[float]], each: float, other: float) -> None:
    less, more = (planned(losses, budget) for budget in sorted((each, other)))
    assert more.prediction.loss <= less.prediction.loss
    assert less.budget.used <= less.budget.limit <= more.budget.limit


@settings(max_examples=settings.default.max_examples // 2)
@given(ROWS, st.sampled_from([PREFILL, DECODE]), BUDGETS, BUDGETS)
def test_more_time_predicts_no_more(losses: Any, workload: str, each: float, other: float) -> None:
    less, more = sorted((each, other))
    try:
        tight = planned(losses, 1.0, {workload: less})
    except BudgetError:
        assume(False)
    assert planned(losses, 1.0, {workload: more}).prediction.loss <= tight.prediction.loss


@settings(max_examples=settings.default.max_examples // 2)
@given(ROWS, BUDGETS, st.integers(-300, 300))
def test_a_unit_of_two_to_a_power_changes_no_dim(losses: list[list[float]], budget: float, power: int) -> None:
    scaled = planned([[loss * 2.0**power for loss in row] for row in losses], budget)
    plain = planned(losses, budget)
    assert [site.weights for site in scaled.sites] == [site.weights for site in plain.sites]
    assert scaled.prediction.loss == plain.prediction.loss * 2.0**power


# --- what a plan remembers of the candidates that were not chosen ---------------------------------------------------

TWO_SITES = [[8, 4, 2, 1, 0.5], [6, 3, 1.5, 0.75, 0.375]]


@pytest.fixture
def plan() -> Plan:
    """192 of 288 parameters: ranks of 24 parameters each."""
    return decide(asking(problem(TWO_SITES, LATENCIES), 0.667)).plan


def test_a_smaller_one_and_a_larger_one_than_dense_there_is_none(plan: Plan) -> None:
    assert [(site.weights[0].dim, site.params) for site in plan.sites] == [(4, 96), (4, 96)]
    for site in plan.sites:
        smaller, larger = site.alternatives
        assert smaller.params < site.params < larger.params
        assert smaller.loss > site.loss > larger.loss
    full = decide(asking(problem(TWO_SITES, LATENCIES), 1.0)).plan
    assert all(each.params < site.params for site in full.sites for (each,) in [site.alternatives])


# --- limits ---------------------------------------------------------------------------------------------------------

UNKNOWN = "decode:4@8"
TWO = problem(TWO_SITES, LATENCIES, [PREFILL, UNKNOWN])


@pytest.mark.parametrize(
    ("budget", "total", "limit"),
    [
        (0.8, 106168320, 84934656),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.1 + 0.2, 10, 3),
        (0.7, 10, 7),
        (1, 7, 7),
        (1.0, 10**18 + 1, 10**18 + 1),
        (np.float32(0.5), 9, 4),
        (1e-9, 10**9, 1),
    ],
)
def test_a_budget_is_floored_exactly(budget: float, total: int, limit: int) -> None:
    assert floored(budget, total) == limit


@pytest.mark.parametrize(
    ("limits", "stated"),
    [
        ({PARAMS: 47}, "the limit of parameters of 47 cannot be met: it falls short by 1"),
        ({PARAMS: 288, ns_of(PREFILL): 19}, "the latency limit in ns for prefill:1x8 of 19 .* falls short by 1"),
    ],
)
def test_a_limit_that_cannot_be_met_is_named(limits: dict[str, int], stated: str) -> None:
    with pytest.raises(BudgetError, match=stated):
        as_knapsack(TWO.candidates(limits), limits).solve()


def test_a_candidate_of_unknown_latency_is_left_out() -> None:
    lacking = [row for row in rows(8, LATENCIES) if row.shape.get("r", 0) < 4]
    of, limits = replace(TWO, profile=profile(lacking)), {PARAMS: 144, ns_of(PREFILL): 120}
    instance = as_knapsack(of.candidates(limits), limits)
    assert [group.costs[:, 0].tolist() for group in instance.groups] == [[24, 48, 72, 144]] * 2
    assert [each.dims for each in instance.chosen(instance.solve())] == [(3,), (3,)]


@pytest.mark.parametrize(("close", "proofs"), [(1.0, ["feasible"]), (0.0, ["feasible", "optimal"])])
def test_a_close_choice_will_do(close: float, proofs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gac.allocation.problem.PATIENCE", 0.0)
    monkeypatch.setattr("gac.allocation.problem.CLOSE", close)
    result: list[Solution] = []
    limits = {PARAMS: 150}

    def listened(*stated: Any, **options: Any) -> Solution:
        result.append(knapsack(*stated, **options))
        return result[-1]

    monkeypatch.setattr("gac.allocation.problem.knapsack", listened)
    solution = as_knapsack(TWO.candidates(limits), limits).solve()
    assert [each.certificate.status for each in result] == proofs
    assert solution is result[-1]


def test_limits_are_fractions_of_what_the_dense_model_takes() -> None:
    recipe = Recipe.of(0.5, memory=0.7, workloads=[PREFILL, UNKNOWN], latency={PREFILL: 0.9})
    assert TWO.dense.allowed(recipe) == {"params": 144, "bytes": 403, ns_of(PREFILL): 108}
