"""The contract of every study, on machines that hold its claim, exceed it, or have no cliff at all."""

from dataclasses import replace

import pytest

from gac.core.errors import ProfileError
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.records import Measurement, Point
from gac_extensions.lab.studies import STUDIES, Study
from gac_extensions.tests.lab.studies.machines import Machine, a100, flat


@pytest.fixture(params=STUDIES.names)
def study(request) -> Study:
    return STUDIES.get(request.param)


def test_points_are_operations_that_are_listed_once(study: Study) -> None:
    points = study.points()
    assert len(points) == len(set(points)) > 0
    for point in points:
        operator, axes = point.operation.operator, point.operation.axes
        assert point == Point(operation(operator, **axes), point.dtype)
        assert point.dtype in OPERATORS.get(operator).dtypes


def test_all_studies_take_less_than_six_minutes() -> None:
    points = {point for study in STUDIES for point in study.points()}
    timed = [ns for ns in (Machine(a100)(point).median_ns for point in points) if ns is not None]
    assert len(points) < 1100
    assert sum(3 * (0.025 + 12e-9 * ns) for ns in timed) < 150


def test_the_verdict_and_the_table_of_a_machine_without_cliffs(study: Study) -> None:
    result = study.judge(Machine(flat))
    assert result.verdict == "did not hold"
    assert result.sentence.startswith("Does not hold on this GPU: ")
    assert result.rows
    assert {len(row) for row in result.rows} == {len(result.columns)}
    assert result.study == study.name
    assert result.notes[0].startswith("rule: ")


def test_a_study_that_was_not_run_says_how_to_run_it(study: Study) -> None:
    with pytest.raises(ProfileError, match=rf"of study {study.name} are not measured.*with gac study {study.name}\."):
        study.judge(lambda point: None)


def test_where_everything_is_refused_the_verdict_says_why(study: Study) -> None:
    result = study.judge(Machine(lambda point: ("out of memory", "")))
    assert result.verdict == "other"
    assert result.sentence.startswith("Cannot be told on this GPU, which refuses ")
    assert result.sentence.endswith(": out of memory.")
    assert len(result.rows) == len(study.points())


@pytest.mark.parametrize("measured", [0, 1, 2])
def test_some_refusals_leave_a_verdict_and_are_named(study: Study, measured: int) -> None:
    refused = {point for number, point in enumerate(study.points()) if number % 3 != measured}
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
