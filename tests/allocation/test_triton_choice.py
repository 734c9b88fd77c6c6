"""``low_rank:triton`` beside ``low_rank``: the same pair, timed on its own at one row."""

from dataclasses import replace

import numpy as np
import pytest
from small_problems import DECODE, MADE_FROM, PREFILL, SIDE, measured, problem, profile, rows

from gac.allocation.latencies import Timing
from gac.allocation.problem import decide
from gac.errors import PlanError
from gac.files import from_json, to_json
from gac.forms import FORMS, Weight, form_named, low_rank, low_rank_triton
from gac.models.shapes import SHAPES
from gac.plan import Plan
from gac.profiling.sweeps.coverage import fused_points, model_points
from gac.sites import Workload

PLAIN, TRITON = form_named("low_rank"), form_named("low_rank:triton")
WEIGHT = Weight("q", 64, 48)
LOSSES = [[0.5, 0.4, 0.3, 0.2, 0.1], [1.5, 1.0, 0.6, 0.3, 0.1]]
FORMS_ASKED = ("low_rank", "low_rank:triton")


def plan(triton_ns: int, latency: dict[str, float]) -> Plan:
    """Two weights, pairs in 40 ns at one row and 10 ns at eight, dense in 50: Triton's in ``triton_ns`` at one row."""
    posed = problem(LOSSES, [0] * 6)
    table = profile(
        [
            *rows(8, [10, 10, 10, 10, 10, 50]),
            *rows(1, [40, 40, 40, 40, 40, 50]),
            *(measured("low_rank_triton", triton_ns, m=1, k=SIDE, r=rank, n=SIDE) for rank in range(1, 6)),
        ]
    )
    made_from = replace(MADE_FROM, forms=FORMS_ASKED)
    return decide(replace(posed, forms=FORMS_ASKED, profile=table), 0.9, latency, made_from).plan


def test_it_is_low_rank_in_all_but_what_runs_at_one_row() -> None:
    assert (TRITON.kind, TRITON.full(WEIGHT), TRITON.params(WEIGHT, 16)) == ("low_rank", 48, 16 * (64 + 48))
    assert TRITON.operation(WEIGHT, 16, 1) == low_rank_triton(48, 16, 64)
    assert TRITON.operation(WEIGHT, 16, 8) == PLAIN.operation(WEIGHT, 16, 8) == low_rank(8, 48, 16, 64)
    assert TRITON.fused(WEIGHT, 16) == PLAIN.fused(WEIGHT, 16)
    assert TRITON.after(WEIGHT, 16, 1) == PLAIN.after(WEIGHT, 16, 1)


def test_it_is_asked_for_by_its_whole_name() -> None:
    assert "low_rank:triton" not in FORMS
    with pytest.raises(PlanError) as caught:
        form_named("low_rank:cuda")
    assert str(caught.value) == (
        "form 'low_rank:cuda' is unknown; expected one of dense, low_rank, narrow, head_dim, grouped, low_rank:triton. "
        "Correct the name."
    )


@pytest.mark.parametrize(("triton_ns", "form"), [(30, "low_rank:triton"), (45, "low_rank")])
def test_where_decode_is_limited_the_faster_pair_is_chosen(triton_ns: int, form: str) -> None:
    made = plan(triton_ns, {DECODE: 0.8})
    assert {weight.form for weight in made.weights} == {form}
    assert made.sites[0].latency_ns[1] == min(triton_ns, 40)


def test_a_limit_that_plain_pairs_cannot_meet_is_met() -> None:
    assert {weight.form for weight in plan(30, {DECODE: 0.6}).weights} == {"low_rank:triton"}


def test_its_prefill_is_that_of_any_pair() -> None:
    assert plan(30, {DECODE: 0.6, PREFILL: 0.2}).sites[0].latency_ns == (10, 30)


def test_a_plan_with_it_is_read_back() -> None:
    made = plan(30, {DECODE: 0.6})
    assert from_json(Plan, to_json(made), "plan.json", PlanError) == made


def test_dims_are_sound_for_what_runs_at_each_number_of_rows() -> None:
    """At one row the table shows rank 16 five times slower than rank 32; at eight rows 48 than 64."""
    sizes = (16, 32, 48, 64)
    ns = {("low_rank_triton", 1): (50, 10, 20, 30), ("low_rank", 8): (10, 20, 90, 30)}
    table = profile(
        [
            measured(operator, taken, m=m, k=SIDE, r=rank, n=SIDE)
            for (operator, m), column in ns.items()
            for rank, taken in zip(sizes, column, strict=True)
        ]
    )
    timing = Timing(table, tuple(map(Workload.parse, (PREFILL, DECODE))))
    sound = timing.sound(TRITON, Weight("q", SIDE, SIDE), np.array(sizes), False)
    assert sound.tolist() == [False, True, False, True]


def test_a_sweep_for_it_measures_one_row_more() -> None:
    plain, both = (set(model_points("smollm2", forms=forms)) for forms in (("low_rank",), FORMS_ASKED))
    added = both - plain
    assert {point.operation.operator for point in added} == {"low_rank_triton"}
    assert {(point.operation.axes["m"], point.operation.axes["r"] % 16) for point in added} == {(1, 0)}
    assert plain < both
    assert fused_points("smollm2")
    assert SHAPES["smollm2"].hidden_size in {point.operation.axes["k"] for point in added}
