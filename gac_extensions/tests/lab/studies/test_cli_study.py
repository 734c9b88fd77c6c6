"""``gac study``: listing, judging a recorded profile, measuring first."""

from pathlib import Path
from typing import Any

import pytest

from gac.profiling.records import Point
from gac_extensions.lab.studies import STUDIES
from tests.cli.commands import answer, refused, run, write_profile

NAMES = ("gemm-k", "round-to-aligned")


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile with all the points of two studies."""
    points = dict.fromkeys(point for name in NAMES for point in STUDIES.get(name).points())
    path = tmp_path_factory.mktemp("studies") / "studied.jsonl"
    return write_profile(path, points, lambda point: point.operation.axes.get("d") or point.operation.axes["k"])


def test_without_a_name_the_studies_are_listed() -> None:
    listed = answer("study")["studies"]
    assert [entry["name"] for entry in listed] == list(STUDIES.names)
    assert all(entry["claim"] and entry["shapes"] for entry in listed)
    assert "gemm-k" in run("study").stdout


def test_a_recorded_profile_is_judged_without_a_gpu(studied: Path) -> None:
    document = answer("study", "gemm-k", "--profile", studied)
    (result,) = document["results"]
    assert (document["gpu"], result["study"]) == ("NVIDIA Test GPU", "gemm-k")
    assert result["verdict"] in {"held", "did not hold", "other"}
    assert len(result["rows"][0]) == len(result["columns"])
    shown = " ".join(run("study", "gemm-k", "--profile", studied).stdout.split())
    assert " ".join(result["sentence"].split()) in shown
    assert f"{result['verdict']}: " not in shown
    assert "published: K % 8 != 0 costs 25-60 %" in shown


def test_several_studies_end_with_one_line_each(studied: Path) -> None:
    shown = run("study", *NAMES, "--profile", studied).stdout
    table = shown[shown.index("study             verdict") :]
    assert [line.split()[0] for line in table.splitlines()[2:] if line and line[0] != " "] == list(NAMES)


def test_a_study_that_was_not_measured_fails_alone_and_is_a_problem_among_others(studied: Path) -> None:
    assert "points of study gemv are not measured" in refused("study", "gemv", "--profile", studied)
    document = answer("study", "--all", "--profile", studied)
    assert {result["study"] for result in document["results"]} >= set(NAMES)
    assert "points of study gemv are not measured" in document["problems"]["gemv"]
    assert refused("study", "--all", "gemm-kk").endswith("Did you mean 'gemm-k'?\n")


def test_without_a_profile_what_is_missing_is_measured_first(studied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []

    def profile_gpu(points: tuple[Point, ...], path: Path, passes: int) -> Path:
        requests.append((points, path.name, passes))
        return studied

    monkeypatch.setattr("gac.profiling.timing.device.require_gpu", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("gac.profiling.sweeps.profiler.profile_gpu", profile_gpu)
    document = answer("study", "gemm-k", "gemm-k", "--passes", "2")
    assert requests == [(STUDIES.get("gemm-k").points(), "nvidia-h100-80gb-hbm3-studies.jsonl", 2)]
    assert document["profile"] == "studied"
