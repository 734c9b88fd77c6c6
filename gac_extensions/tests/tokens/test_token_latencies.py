"""Latency of attention over the kept tokens: from a made-up table, in the choice and in the plan."""

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
from gac.profiling.records import Point
from gac_extensions.tests.tokens.test_token_plan import BUDGETS, curves, plan_of
from gac_extensions.tokens.decide import AttentionLatency, TimeLimit, decide, decode_workloads, latency_fractions
from gac_extensions.tokens.defaults import SHARES, STEP
from gac_extensions.tokens.layers import token_points
from tests.allocation.test_latencies import table
from tests.models.small import small_config

LLAMA, LONG = heads_of(SHAPES["llama-3-8b"]), Workload.parse("decode:1@32768")
POINTS = token_points("llama-3-8b", [LONG], SHARES, STEP)
SMALL, AT_64 = Heads(4, 2, 32), Workload.parse("decode:1@64")
SMALL_POINTS = [Point(SMALL.over(1, tokens)) for tokens in BUDGETS]
NAME = str(AT_64)


def by_tokens(point: Point) -> float:
    """100 ns, and 10 for each token."""
    return 100 + 10 * point.operation.axes["t"]


def ns(heads: Heads, tokens: int) -> int:
    return int(by_tokens(Point(heads.over(1, tokens))))


def small(points: Any = SMALL_POINTS, cut: int = 4, **options: Any) -> AttentionLatency:
    return AttentionLatency(SMALL, table(points, by_tokens), cut, **options)


def time_limit(fraction: float, latency: AttentionLatency | None = None) -> TimeLimit:
    return TimeLimit.of(latency or small(), AT_64, fraction, BUDGETS, 8)


def decided(*times: TimeLimit) -> Any:
    return decide(range(4), BUDGETS, curves(4), 4 * 64, times)


def test_profile_measures_each_share_of_a_context() -> None:
    assert Heads(32, 8, 128) == LLAMA
    assert [point.operation for point in POINTS] == [attend(1, 32, 8, 4096 * eighth, 128) for eighth in range(1, 9)]
    both = token_points("llama-3-8b", [LONG, Workload.parse("prefill:1x1024")], SHARES, STEP, "fp16")
    assert both == tuple(replace(point, dtype="fp16") for point in POINTS)
    windowed = token_points("gemma-3-4b", [Workload.parse("decode:2@5000")], (0.1, 0.5), 16)
    assert [point.operation.axes["t"] for point in windowed] == [496, 1024, 2496, 5000]  # 1024: the window
    with pytest.raises(ProfileError, match="without a workload that decodes"):
        token_points("llama-3-8b", [Workload.parse("prefill:1x1024")], SHARES, STEP)
    assert heads_of(small_config("llama")) == SMALL
    assert heads_of(small_config("gpt2")) == Heads(4, 4, 16)


def test_interpolation() -> None:
    latency = AttentionLatency(LLAMA, table([*POINTS, Point(LLAMA.over(1, 4224))], by_tokens), 32)
    values, sources = latency.by_tokens(LONG, [4096, 4160, 8192, 10000])
    assert values.tolist() == [ns(LLAMA, 4096), ns(LLAMA, 4224), ns(LLAMA, 8192), UNKNOWN]
    assert sources[:3].tolist() == [MEASURED, INTERPOLATED, MEASURED]


def test_total_of_all_layers() -> None:
    uncut = 2 * ns(SMALL, 16)
    planned = ns(SMALL, 8) + ns(SMALL, 64) + ns(SMALL, 24) + uncut
    total = small(cut=3, uncut=2, window=16).total(AT_64, [8, 64, 24])
    assert total == WorkloadLatency(NAME, 3 * ns(SMALL, 64) + uncut, planned, 5, 0, 0)
    total = small(SMALL_POINTS[-1:], cut=3).total(AT_64, [8, 64, 24])
    assert total == WorkloadLatency(NAME, 3 * ns(SMALL, 64), None, 1, 0, 2)
    without = AttentionLatency(SMALL, None, 2).total(AT_64, [8, 64])
    assert without == WorkloadLatency(NAME, None, None, 0, 0, 2)


def test_latency_limit() -> None:
    assert [layer.kept for layer in decided()[1]] == [64] * 4
    times = time_limit(0.8)
    certificate, layers = decided(times)
    assert sum(ns(SMALL, layer.kept) for layer in layers) <= times.limit == floored(0.8, 4 * ns(SMALL, 64))
    assert (certificate.status, len(certificate.multipliers)) == ("optimal", 2)
    assert [layer.kept for layer in layers] == [32, 48, 56, 56]


def test_latency_limit_includes_layers_of_a_window() -> None:
    times = time_limit(0.8, small(cut=4, uncut=2, window=64))
    assert (times.uncut_ns, times.limit) == (2 * ns(SMALL, 64), floored(0.8, 6 * ns(SMALL, 64)))
    assert sum(ns(SMALL, layer.kept) for layer in decided(times)[1]) + times.uncut_ns <= times.limit


def test_budgets_of_unknown_latency_are_excluded_under_a_limit() -> None:
    _, layers = decided(time_limit(0.9, small([SMALL_POINTS[3], SMALL_POINTS[-1]])))
    assert {layer.kept for layer in layers} == {32, 64}
    assert [len(layer.priced) for layer in layers] == [8] * 4


def test_infeasible_limits() -> None:
    with pytest.raises(BudgetError, match=rf"the limit of latency at {NAME}.*expected {4 * ns(SMALL, 8)} or more"):
        decided(time_limit(0.1))
    measured = f"gac profile --model NAME --tokens --workload {NAME}"
    with pytest.raises(ProfileError, match=f"lacks attention over the whole cache.*{measured}"):
        time_limit(0.5, small(SMALL_POINTS[:-1]))
    with pytest.raises(ProfileError, match=f"lacks attention over 8 to 56 of 64 tokens.*{measured}"):
        time_limit(0.5, small(SMALL_POINTS[-1:]))


def test_invalid_workloads() -> None:
    with pytest.raises(GacError, match=r"workload prefill:1x64 .*expected decode:B@C"):
        decode_workloads([NAME, "prefill:1x64"])
    assert latency_fractions(0.5, [AT_64, LONG]) == {NAME: 0.5, str(LONG): 0.5}
    with pytest.raises(PlanError, match=f"a limit of latency at {LONG}; expected one of {NAME}"):
        latency_fractions({str(LONG): 0.5}, [AT_64])


def test_cache_bytes_at_any_length() -> None:
    plan = plan_of(curves(4), 4 * 32, whole=(4, 5), window=16, workloads=(WorkloadLatency(str(LONG), 1, 1, 6, 0, 0),))
    assert plan.contexts == (64, 32768)
    token = 2 * 2 * 2 * 32  # keys and values of 16 bits, 2 heads of 32 numbers
    assert plan.cache_bytes(64) == (token * (plan.used + 2 * 16), token * (4 * 64 + 2 * 16))
    kept = sum(plan.kept(layer.layer, 32768) for layer in plan.layers)
    assert plan.cache_bytes(32768) == (token * (kept + 2 * 16), token * (4 * 32768 + 2 * 16))


def test_plan_breaks_its_own_latency_limit() -> None:
    plan = plan_of(curves(4), 4 * 32)
    proof, timed = replace(plan.certificate, multipliers=(0.0, 0.0)), WorkloadLatency(NAME, 10, 5, 4, 0, 0)
    limited = replace(plan, latency={NAME: 0.5}, workloads=(timed,), certificate=proof)
    for workloads in ((), (replace(timed, plan_ns=6),), (replace(timed, plan_ns=None),)):
        with pytest.raises(PlanError, match=f"expected at most 0.5 of the dense attention at {NAME}"):
            replace(limited, workloads=workloads)
