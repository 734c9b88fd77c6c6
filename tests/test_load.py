"""What is large is still right; ``tests/benchmarks/load.py`` has the sizes that people promise, and the seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from gac.core.operations import linear
from gac.profiling.records import Point
from gac.profiling.table import Profile
from tests.benchmarks import load
from tests.cli.commands import refused


def test_a_profile_of_many_chunks_keeps_its_rows_passes_and_lookups(tmp_path: Path) -> None:
    load.write_profile(tmp_path / "p.jsonl", rows=12_000, passes=3)
    profile = Profile.load(tmp_path / "p.jsonl")
    assert len(profile.measurements) == 12_000
    row = profile.measurements[11_000]
    assert (row.shape, row.passes) == ({"m": 1024, "k": 4098, "n": 1001}, (20_910.5, 20_253.0, 20_253.0))
    assert profile.find(Point(linear(1024, 4098, 1001))) == row
    assert profile.find(Point(linear(1024, 4098, 9001))) is None
    assert len(profile.rows_of("linear", {"m": 1024, "k": 4097}, "n")) == 5000


@pytest.mark.slow
def test_a_profile_of_a_million_rows_takes_less_than_a_gigabyte() -> None:
    done = subprocess.run([sys.executable, load.__file__, "profile"], capture_output=True, text=True, check=True)
    what, _, gigabytes = done.stdout.rpartition(", ")
    assert what.startswith("a profile of 1,000,000 rows, 1 passes, 216 MB, opened: ")
    assert float(gigabytes.removesuffix(" GB\n")) < 1


def test_a_point_that_is_there_again_thousands_of_lines_later_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    load.write_profile(path, rows=5000, passes=1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[100]]))
    assert f"{path}:5066: linear {{'m': 1024, 'k': 4096, 'n': 36}} is there twice" in refused("cliffs", path)


def test_a_choice_for_a_model_of_llama_3_70b_size_is_proved_optimal() -> None:
    _, what = load.plan()
    assert what == "a choice for 560 sites among 291,440 candidates, proved optimal"
