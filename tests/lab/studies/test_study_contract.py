"""The contract of every study, on machines that hold its claim, exceed it, or have no cliff at all."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from gac.core.errors import ProfileError
from gac.lab.studies import STUDIES, Study
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.records import Measurement, Point
from tests.lab.studies.machines import Answer, Machine, a100, flat, hopper

EVERY = [pytest.param(study, id=name) for name, study in zip(STUDIES.names, STUDIES, strict=True)]
AS_PUBLISHED = ("sdpa-dense", "vector-width", "l2-sector")
ABSENT = ("gemm-m", "heterogeneous-heads", "int4-regimes")
STEEPER = (
    dict.fromkeys(STUDIES.names, "other") | dict.fromkeys(AS_PUBLISHED, "held") | dict.fromkeys(ABSENT, "did not hold")
)
VERDICTS = {
    a100: dict.fromkeys(STUDIES.names, "held"),
    hopper: STEEPER,
    flat: dict.fromkeys(STUDIES.names, "did not hold"),
}
OPENINGS = {"held": "Holds", "did not hold": "Does not hold", "other": "Differs"}


@pytest.mark.parametrize("study", EVERY)
def test_points_are_whole_operations_that_are_listed_once(study: Study) -> None:
    points = study.points()
    assert len(points) == len(set(points)) > 0
    for point in points:
        assert operation(point.operation.operator, **point.operation.axes) == point.operation
        assert point.dtype in OPERATORS.get(point.operation.operator).dtypes
        assert point.cache == "cold"


def test_all_studies_together_take_less_than_six_minutes() -> None:
    points = {point for study in STUDIES for point in study.points()}
    timed = [ns for ns in (Machine(hopper)(point).median_ns for point in points) if ns is not None]
    seconds = sum(3 * (0.025 + 12e-9 * ns) for ns in timed)
    assert len(points) < 1100
    assert seconds < 150
    assert sum("math" in point.operation.operator for point in points) == 6


@pytest.mark.parametrize("study", EVERY)
@pytest.mark.parametrize("rule", VERDICTS, ids=["published", "steeper", "flat"])
def test_the_verdict_and_the_table_of_a_machine(study: Study, rule: Callable[[Point], Answer]) -> None:
    result = study.judge(Machine(rule))
    assert result.verdict == VERDICTS[rule][study.name]
    assert result.sentence.startswith(f"{OPENINGS[result.verdict]} on this GPU: ")
    assert result.rows
    assert {len(row) for row in result.rows} == {len(result.columns)}
    assert result.study == study.name
    assert result.notes[0].startswith("rule: ")
    assert "\n" not in result.sentence


@pytest.mark.parametrize("study", EVERY)
def test_a_study_that_was_not_run_says_how_to_run_it(study: Study) -> None:
    count = len(study.points())
    with pytest.raises(ProfileError) as caught:
        study.judge(lambda point: None)
    assert str(caught.value) == (
        f"{count} of the {count} points of study {study.name} are not measured; expected every one of them. "
        f"Measure them with gac study {study.name}."
    )


@pytest.mark.parametrize("study", EVERY)
def test_where_everything_is_refused_the_verdict_says_why(study: Study) -> None:
    result = study.judge(Machine(lambda point: ("out of memory", "")))
    assert result.verdict == "other"
    assert result.sentence.startswith("Cannot be told on this GPU, which refuses ")
    assert result.sentence.endswith(": out of memory.")
    assert len(result.rows) == len(study.points())


@pytest.mark.parametrize("study", EVERY)
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_some_refusals_leave_a_verdict_and_are_named(study: Study, kept: int) -> None:
    refused = {point for number, point in enumerate(study.points()) if number % 3 != kept}
    machine = Machine(a100)

    def find(point: Point) -> Measurement:
        return Machine(lambda _: ("no kernel", ""))(point) if point in refused else machine(point)

    result = study.judge(find)
    assert result.verdict in {"held", "did not hold", "other"}
    assert [note for note in result.notes if "no kernel" in note]


@pytest.mark.parametrize("name", ["gemm-m", "kernel-tiers"])
def test_a_verdict_by_kernels_needs_them_recorded(name: str) -> None:
    study, machine = STUDIES.get(name), Machine(a100)
    with pytest.raises(ProfileError) as caught:
        study.judge(lambda point: replace(machine(point), launches=()))
    assert caught.value.expected == "the kernels that ran at each point"
