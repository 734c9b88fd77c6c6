"""Plans for linear weights that multiply one row in Triton: latencies of their own, and dims that it reads fast."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from small_problems import PREFILL, SIDE, asking, measured, problem, profile, rows

from gac.allocation.decide import decide
from gac.allocation.feasibility import check_reachable
from gac.allocation.latencies import MEASURED, UNKNOWN, Timing
from gac.core.errors import BudgetError, ProfileError
from gac.core.operations import batched_gemm, linear
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.forms.low_rank.spec import low_rank
from gac.models.sites import Weight
from gac.plan.plan import Plan
from gac.profiling.operators import with_decode_kernel
from gac.profiling.sweeps.coverage import decode_kernel_points, fused_points, model_points
from gac.profiling.table import Profile

LOSSES = [[0.5, 0.4, 0.3, 0.2, 0.1], [1.5, 1.0, 0.6, 0.3, 0.1]]
ONE = "decode:1@8"
WORKLOADS = (Workload.parse(PREFILL), Workload.parse(ONE))
WEIGHT = Weight("q", SIDE, SIDE)


def table(dense_ns: int = 45) -> Profile:
    """Pairs in 40 ns at one row and 10 ns at eight, dense in 50: in Triton pairs in 20 and dense in ``dense_ns``."""
    return profile(
        [
            *rows(8, [10, 10, 10, 10, 10, 50]),
            *rows(1, [40, 40, 40, 40, 40, 50]),
            *(measured("low_rank_triton", 20, m=1, k=SIDE, r=rank, n=SIDE) for rank in range(1, 6)),
            measured("linear_triton", dense_ns, m=1, k=SIDE, n=SIDE),
        ]
    )


def plan(triton: bool, latency: Mapping[str, float]) -> Plan:
    kernel = "triton" if triton else "torch"
    of = replace(problem(LOSSES, [1] * 6, [PREFILL, ONE]), profile=table())
    return decide(asking(of, 0.9, latency=latency, decode_kernel=kernel)).plan


@pytest.mark.parametrize(
    ("operation", "operator"),
    [
        (linear(1, 4, 8), "linear_triton"),
        (low_rank(1, 4, 2, 8), "low_rank_triton"),
        (linear(2, 4, 8), "linear"),
        (low_rank(16, 4, 2, 8), "low_rank"),
        (batched_gemm(2, 1, 4, 8), "batched_gemm"),
    ],
)
def test_what_runs_in_triton(operation, operator: str) -> None:
    assert with_decode_kernel(operation) == replace(operation, operator=operator)


def test_at_one_row_latencies_are_tritons_and_at_more_they_are_not() -> None:
    timing = Timing(table(), WORKLOADS, triton=True)
    for form, dim, expected in (("low_rank", 3, [10, 20]), ("dense", SIDE, [50, 45])):
        latency, how = timing.of_weight(form_named(form), WEIGHT, np.array([dim]))
        assert latency.tolist() == [expected]
        assert (how == MEASURED).all()


def test_so_is_the_gemm_that_weights_share() -> None:
    shared = profile([measured("linear_triton", 7, m=1, k=SIDE, n=30), measured("linear", 9, m=1, k=SIDE, n=30)])
    for triton, expected in ((True, 7), (False, 9)):
        latency, _ = Timing(shared, WORKLOADS[1:], triton).of_fused(WEIGHT, np.array([[30]]))
        assert latency.tolist() == [[expected]]


def test_a_latency_that_cublas_cannot_meet_is_met() -> None:
    made = plan(True, {ONE: 0.5})
    assert {weight.form for weight in made.weights} == {"low_rank"}
    assert made.sites[0].latency_ns == (10, 20)
    assert [one.dense_ns for one in made.workloads] == [100, 100]  # the dense model beside it runs as it is
    assert "decode kernel in Triton" in made.summary()
    with pytest.raises(BudgetError, match="latency"):
        plan(False, {ONE: 0.5})


def test_dims_are_multiples_of_16_and_sound_for_what_runs_at_each_number_of_rows() -> None:
    """At one row the table shows rank 16 five times slower than rank 32; at eight rows 48 than 64."""
    sizes = (8, 16, 32, 48, 64)
    ns = {("low_rank_triton", 1): (9, 50, 10, 20, 30), ("low_rank", 8): (10, 10, 20, 90, 30)}
    sweep = profile(
        [
            measured(operator, taken, m=m, k=SIDE, r=rank, n=SIDE)
            for (operator, m), column in ns.items()
            for rank, taken in zip(sizes, column, strict=True)
        ]
    )
    timing = Timing(sweep, WORKLOADS, triton=True)
    sound = timing.sound(form_named("low_rank"), WEIGHT, np.array(sizes), False)
    assert sound.tolist() == [False, False, True, False, True]


def test_a_profile_without_these_shapes_is_refused_where_one_row_is_asked_for() -> None:
    of = asking(problem(LOSSES, [40, 40, 40, 40, 40, 50]), 1.0, decode_kernel="triton")
    with pytest.raises(ProfileError) as caught:
        check_reachable(of.sites, of.recipe, of.profile)
    assert str(caught.value) == (
        "the profile lacks the latency of site0 for decode:1@8 in Triton; expected a profile of this model's shapes at "
        "one row. Measure it with gac profile --model NAME --decode-kernel triton (and --fuse), or plan without it."
    )
    prefill = asking(of, 1.0, workloads=[PREFILL])
    check_reachable(prefill.sites, prefill.recipe, prefill.profile)
    check_reachable(of.sites, of.recipe, table())
    unknown = Timing(of.profile, WORKLOADS, triton=True).of_weight(form_named("dense"), WEIGHT, np.array([SIDE]))
    assert unknown[0].tolist() == [[50, UNKNOWN]]


def test_a_sweep_for_it_measures_what_has_one_row_again() -> None:
    for points in (model_points("smollm2"), fused_points("smollm2")):
        added = decode_kernel_points(points)
        assert {point.operation.operator for point in added} <= {"linear_triton", "low_rank_triton"}
        single = [point for point in points if point.operation.axes["m"] == 1]
        assert len(added) == len(single) == len(set(added))
        assert [point.operation.shape for point in added] == [point.operation.shape for point in single]
    assert decode_kernel_points(model_points("smollm2", [Workload.parse("decode:8@8")])) == ()
