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
    options = ["--against", tmp_path / "uniform.json", "--frontier", tmp_path / "frontier.json", "-o", target]
    document = answer("report", plan, *options)
    assert document == {"path": str(target), "bytes": target.stat().st_size, "sites": 2}
    page = target.read_text(encoding="utf-8")
    assert "A GAC plan (plan) for the NVIDIA Test GPU" in page
    assert '<th scope="row">uniform</th>' in page


def test_the_profile_is_looked_up_by_its_digest(plan: Path, tmp_path: Path) -> None:
    target, shipped, recorded = tmp_path / "report.html", Profile.load("nvidia-h100-80gb-hbm3"), decided()
    message = "expected 222222222222, the one that the plan was made with"
    assert message in refused("report", plan, "--profile", "nvidia-h100-80gb-hbm3", "-o", target)
    assert not target.exists()
    assert "the latency table 222222222222 is not at hand" in run("report", plan, "-o", target).stderr
    with_measured(recorded, profile=replace(recorded.measured.profile, digest=shipped.digest)).save(plan)
    result = run("report", plan, "-o", target)
    assert (result.exit_code, "not at hand" in result.stderr) == (0, False)
    page = target.read_text(encoding="utf-8")
    assert f"driver {shipped.header.driver}" in page
    assert " --profile nvidia-h100-80gb-hbm3 --calibration " in page
