"""What every study keeps to, on machines that hold its claim, exceed it, or have no cliff at all."""

from dataclasses import replace

import pytest

from gac.errors import ProfileError
from gac.lab.studies import STUDIES, Study
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.records import Measurement, Point
from tests.lab.studies.machines import Machine, a100, flat, hopper

UNPUBLISHED = {"heterogeneous-heads"}
"""No latency of theirs is published."""

EVERY = [pytest.param(study, id=name) for name, study in zip(STUDIES.names, STUDIES, strict=True)]
MACHINES = [pytest.param(Machine(rule), id=rule.__name__) for rule in (a100, hopper, flat)]


def test_the_studies_are_those_of_the_published_work() -> None:
    assert list(STUDIES.names) == [
        "sdpa-dense",
        "sdpa-backends",
        "gemm-k",
        "gemm-n",
        "gemm-m",
        "gemv",
        "padding-rescue",
        "round-to-aligned",
        "heterogeneous-heads",
        "tensor-core",
        "vector-width",
        "l2-sector",
        "sdpa-bandwidth",
        "kernel-tiers",
        "fa-templates",
        "int4-regimes",
        "head-dim-132",
    ]


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


def test_few_points_run_the_math_backend() -> None:
    points = {point for study in STUDIES for point in study.points()}
    assert sum("math" in point.operation.operator for point in points) == 6


@pytest.mark.parametrize("study", [study for study in STUDIES if study.name not in UNPUBLISHED])
def test_the_published_figures_hold_the_published_claim(study: Study) -> None:
    assert study.judge(Machine(a100)).verdict == "held"


@pytest.mark.parametrize("study", EVERY)
def test_no_claim_holds_on_a_machine_without_cliffs(study: Study) -> None:
    result = study.judge(Machine(flat))
    assert result.verdict == "did not hold"
    assert result.sentence.startswith("Does not hold on this GPU: ")


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("sdpa-backends", "other"),
        ("gemm-k", "other"),
        ("gemm-n", "other"),
        ("gemv", "other"),
        ("padding-rescue", "other"),
        ("l2-sector", "held"),
        ("sdpa-bandwidth", "other"),
        ("kernel-tiers", "other"),
        ("fa-templates", "other"),
        ("head-dim-132", "other"),
    ],
)
def test_steeper_cliffs_and_other_kernels_are_another_form(name: str, verdict: str) -> None:
    assert STUDIES.get(name).judge(Machine(hopper)).verdict == verdict


@pytest.mark.parametrize("study", EVERY)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_row_has_a_cell_for_every_column(study: Study, machine: Machine) -> None:
    result = study.judge(machine)
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


def test_an_unknown_study_names_the_nearest() -> None:
    with pytest.raises(ProfileError) as caught:
        STUDIES.get("gemm-kk")
    assert caught.value.remedy == "Did you mean 'gemm-k'?"
