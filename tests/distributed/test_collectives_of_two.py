"""Two processes measure collectives together, over gloo: they launch the same, and rank 0 writes the table."""

from pathlib import Path

import pytest

from gac.profiling.table import Profile
from tests.distributed import collectives_work as work
from tests.distributed.herd import Ended, together


@pytest.mark.slow
def test_two_processes_time_together_what_neither_can_alone(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    assert together(2, work.sweep, tmp_path / "home", path) == Ended([0, 0], ["", ""], ["", ""])
    found = Profile.load(path)
    assert (found.header.device, found.header.others, found.header.link) == ("0" * 16, ("0" * 15 + "1",), "NVLink")
    assert {one.point for one in found.measurements} == {*work.POINTS}
    assert [len(one.passes) for one in found.measurements if not one.error] == [2, 2, 2]
    (wrong,) = found.failed
    assert (wrong.operator, wrong.shape) == ("all_gather", {"gpus": 2, "m": 3, "n": 64})
    assert wrong.error.startswith("wrong result: relative error")


@pytest.mark.slow
def test_a_gpu_that_fails_in_one_process_ends_all_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    ended = together(2, work.fail_on_one, tmp_path / "home", path)
    assert all(ended.codes)
    assert "Error: GPU 1 failed at all_gather bf16 gpus=2" in ended.errors[0]
    assert "a fault" in ended.errors[0]
    assert {one.operator for one in Profile.load(path).measurements} <= {"all_reduce", "reduce_scatter"}
