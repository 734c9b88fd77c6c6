"""What attention over the tokens that stay takes: from a made-up table, in the choice and in the plan."""

from dataclasses import replace
from typing import Any

import pytest

from gac.allocation.latencies import INTERPOLATED, MEASURED, UNKNOWN
from gac.core.errors import BudgetError, GacError, PlanError, ProfileError
from gac.core.operations import attend
from gac.core.workloads import Workload
from gac.models.attentions import Heads, heads_of
from gac.models.shapes import SHAPES
from gac.plan.costs import floored
from gac.plan.plan import WorkloadLatency
from gac.profiling.operators import OPERATORS
from gac.profiling.records import Point
from gac.profiling.sweeps.coverage import token_points
from gac.tokens.decide import TimeLimit, decide
from gac.tokens.defaults import SHARES, STEP
from gac.tokens.latencies import Attending, decoding, limited
from tests.allocation.test_scheme_latencies import table
from tests.models.small import small_config
from tests.tokens.test_token_plan import BUDGETS, curves, plan_of

LLAMA, LONG = heads_of(SHAPES["llama-3-8b"]), Workload.parse("decode:1@32768")
POINTS = token_points("llama-3-8b", [LONG], SHARES, STEP)
EIGHTHS = [4096 * eighth for eighth in range(1, 9)]
SMALL, AT_64 = Heads(4, 2, 32), Workload.parse("decode:1@64")
SMALL_POINTS = [Point(SMALL.over(1, tokens)) for tokens in BUDGETS]
NAME = str(AT_64)


def by_tokens(point: Point) -> float:
    """100 ns, and 10 for each token."""
    return 100 + 10 * point.operation.axes["t"]


def ns(heads: Heads, tokens: int) -> int:
    return int(by_tokens(Point(heads.over(1, tokens))))


def small(points: Any = SMALL_POINTS, cut: int = 4, **whole: Any) -> Attending:
    return Attending(SMALL, table(points, by_tokens), cut, **whole)


def time_limit(fraction: float, attending: Attending | None = None) -> TimeLimit:
    return TimeLimit.of(attending or small(), AT_64, fraction, BUDGETS, 8)


# --- what is measured -------------------------------------------------------------------------------------------------


def test_a_profile_measures_each_share_of_what_is_decoded_after() -> None:
    assert Heads(32, 8, 128) == LLAMA
    assert [one.operation for one in POINTS] == [attend(1, 32, 8, tokens, 128) for tokens in EIGHTHS]
    both = token_points("llama-3-8b", [LONG, Workload.parse("prefill:1x1024")], SHARES, STEP, "fp16")
    assert [(one.operation, one.dtype) for one in both] == [(one.operation, "fp16") for one in POINTS]


def test_budgets_are_multiples_of_the_step_and_a_window_is_measured_too() -> None:
    points = token_points("gemma-3-4b", [Workload.parse("decode:2@5000")], (0.1, 0.5), 16)
    assert [one.operation.axes["t"] for one in points] == [496, 1024, 2496, 5000]
    assert {one.operation.axes["b"] for one in points} == {2}


def test_attention_over_tokens_kept_needs_a_workload_that_decodes() -> None:
    with pytest.raises(ProfileError, match="without a workload that decodes; expected decode:B@C"):
        token_points("llama-3-8b", [Workload.parse("prefill:1x1024")], SHARES, STEP)


# --- what is looked up ------------------------------------------------------------------------------------------------


def test_each_number_of_tokens_is_looked_up_and_what_lies_between_is_interpolated() -> None:
    attending = Attending(LLAMA, table([*POINTS, Point(LLAMA.over(1, 4224))], by_tokens), 32)
    found, how = attending.each(LONG, [4096, 4160, 8192, 10000])
    assert found.tolist() == [ns(LLAMA, 4096), ns(LLAMA, 4224), ns(LLAMA, 8192), UNKNOWN]
    assert how[:3].tolist() == [MEASURED, INTERPOLATED, MEASURED]


def test_all_layers_together_with_those_of_a_window() -> None:
    attending = small(cut=3, whole=2, window=16)
    found = attending.together(AT_64, [8, 64, 24])
    beside = 2 * ns(SMALL, 16)
    planned = ns(SMALL, 8) + ns(SMALL, 64) + ns(SMALL, 24) + beside
    assert found == WorkloadLatency(NAME, 3 * ns(SMALL, 64) + beside, planned, 5, 0, 0)


def test_what_the_table_lacks_is_unknown_and_counted() -> None:
    found = small(SMALL_POINTS[-1:], cut=3).together(AT_64, [8, 64, 24])
    assert found == WorkloadLatency(NAME, 3 * ns(SMALL, 64), None, 1, 0, 2)
    assert Attending(SMALL, None, 2).together(AT_64, [8, 64]) == WorkloadLatency(NAME, None, None, 0, 0, 2)


# --- what is limited --------------------------------------------------------------------------------------------------


def test_a_limit_of_latency_is_kept_and_proved() -> None:
    free = decide(range(4), BUDGETS, curves(4), 4 * 64)
    assert [one.kept for one in free.layers] == [64] * 4
    times = time_limit(0.8)
    found = decide(range(4), BUDGETS, curves(4), 4 * 64, [times])
    taken = sum(ns(SMALL, one.kept) for one in found.layers)
    assert taken <= times.limit == floored(0.8, 4 * ns(SMALL, 64))
    assert found.certificate.status == "optimal"
    assert len(found.certificate.multipliers) == 2
    assert [one.kept for one in found.layers] == [32, 48, 56, 56]


def test_layers_of_a_window_take_their_part_of_the_limit() -> None:
    attending = small(cut=4, whole=2, window=64)
    times = time_limit(0.8, attending)
    assert (times.beside, times.limit) == (2 * ns(SMALL, 64), floored(0.8, 6 * ns(SMALL, 64)))
    found = decide(range(4), BUDGETS, curves(4), 4 * 64, [times])
    assert sum(ns(SMALL, one.kept) for one in found.layers) + times.beside <= times.limit


def test_budgets_of_unknown_latency_are_no_choice_under_a_limit() -> None:
    times = time_limit(0.9, small([SMALL_POINTS[3], SMALL_POINTS[-1]]))
    found = decide(range(4), BUDGETS, curves(4), 4 * 64, [times])
    assert {one.kept for one in found.layers} == {32, 64}
    assert [len(one.priced) for one in found.layers] == [8] * 4


def test_a_limit_that_cannot_be_met_says_what_can_be_had() -> None:
    with pytest.raises(BudgetError, match=f"the limit of latency at {NAME}") as failure:
        decide(range(4), BUDGETS, curves(4), 4 * 64, [time_limit(0.1)])
    assert f"expected {4 * ns(SMALL, 8)} or more" in str(failure.value)


def test_a_limit_without_latencies_says_how_to_measure_them() -> None:
    measured = f"gac profile --model NAME --tokens --workload {NAME}"
    with pytest.raises(ProfileError, match=f"lacks attention over the whole cache.*{measured}"):
        time_limit(0.5, small(SMALL_POINTS[:-1]))
    with pytest.raises(ProfileError, match=f"lacks attention over 8 to 56 of 64 tokens.*{measured}"):
        time_limit(0.5, small(SMALL_POINTS[-1:]))


def test_prompts_and_limits_of_other_workloads_are_refused() -> None:
    with pytest.raises(GacError, match=r"workload prefill:1x64 of a plan of tokens.*expected decode:B@C"):
        decoding([NAME, "prefill:1x64"])
    assert limited(0.5, [AT_64, LONG]) == {NAME: 0.5, str(LONG): 0.5}
    with pytest.raises(PlanError, match=f"a limit of latency at {LONG}; expected one of {NAME}"):
        limited({str(LONG): 0.5}, [AT_64])


# --- what the plan says -----------------------------------------------------------------------------------------------


def test_a_plan_says_the_bytes_of_its_cache_at_any_length() -> None:
    plan = plan_of(curves(4), 4 * 32, whole=(4, 5), window=16, workloads=(WorkloadLatency(str(LONG), 1, 1, 6, 0, 0),))
    assert plan.contexts == (64, 32768)
    token = 2 * 2 * 2 * 32  # keys and values of 16 bits, 2 heads of 32 numbers
    assert plan.cache_bytes(64) == (token * (plan.used + 2 * 16), token * (4 * 64 + 2 * 16))
    kept = sum(plan.kept(one.layer, 32768) for one in plan.layers)
    assert plan.cache_bytes(32768) == (token * (kept + 2 * 16), token * (4 * 32768 + 2 * 16))


@pytest.mark.parametrize(
    "timed", [[], [WorkloadLatency(NAME, 10, 6, 4, 0, 0)], [WorkloadLatency(NAME, 10, None, 0, 0, 4)]]
)
def test_a_plan_that_breaks_its_own_limit_of_latency_is_refused(timed: list[WorkloadLatency]) -> None:
    plan = plan_of(curves(4), 4 * 32)
    proof = replace(plan.certificate, multipliers=(0.0, 0.0))
    timed_so = (WorkloadLatency(NAME, 10, 5, 4, 0, 0),)
    kept = replace(plan, latency={NAME: 0.5}, workloads=timed_so, certificate=proof)
    with pytest.raises(PlanError, match=f"expected at most 0.5 of the dense attention at {NAME}"):
        replace(kept, workloads=tuple(timed))


def test_heads_are_those_of_the_config() -> None:
    assert heads_of(small_config("llama")) == SMALL
    assert heads_of(small_config("gpt2")) == Heads(4, 4, 16)
    assert OPERATORS.get("sdpa").unmet(SMALL.over(1, 8).axes) is None
