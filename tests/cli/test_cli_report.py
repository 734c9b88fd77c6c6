"""``gac report``: a page from files, or an error that says what to do."""

from dataclasses import replace
from pathlib import Path

import pytest

from gac.profiling.table import Profile
from tests.changed import with_measured
from tests.cli.commands import answer, refused, run
from tests.reporting.report_plans import by_rule, decided, whole_range


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    decided().save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_it_writes_a_page(plan: Path, tmp_path: Path) -> None:
    by_rule().save(tmp_path / "uniform.json")
    whole_range().save(tmp_path / "frontier.json")
    target = tmp_path / "new" / "report.html"
    given = ["--against", tmp_path / "uniform.json", "--frontier", tmp_path / "frontier.json", "-o", target]
    document = answer("report", plan, *given)
    assert document == {"path": str(target), "bytes": target.stat().st_size, "sites": 2}
    page = target.read_text(encoding="utf-8")
    assert "A GAC plan (plan) for the NVIDIA Test GPU" in page
    assert '<th scope="row">uniform</th>' in page


def test_a_profile_that_is_not_at_hand_is_said(plan: Path, tmp_path: Path) -> None:
    result = run("report", plan, "-o", tmp_path / "report.html")
    assert result.exit_code == 0
    assert "the latency table 222222222222 is not at hand" in result.stderr


def test_the_profile_is_found_by_its_digest(plan: Path, tmp_path: Path) -> None:
    found = Profile.load("nvidia-h100-80gb-hbm3")
    ours = decided()
    with_measured(ours, profile=replace(ours.measured.profile, digest=found.digest)).save(plan)
    result = run("report", plan, "-o", tmp_path / "report.html")
    assert result.exit_code == 0
    assert "not at hand" not in result.stderr
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"driver {found.header.driver}" in page
    assert " --profile nvidia-h100-80gb-hbm3 --calibration " in page


def test_another_profile_is_refused(plan: Path, tmp_path: Path) -> None:
    assert "expected 222222222222, the one that the plan was made with" in refused(
        "report", plan, "--profile", "nvidia-h100-80gb-hbm3", "-o", tmp_path / "report.html"
    )
    assert not (tmp_path / "report.html").exists()
