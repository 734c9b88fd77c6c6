"""Shares of work, a single process, and collectives of two."""

from pathlib import Path

import pytest
import torch
from torch import nn

from gac.core.distributed import launch
from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.errors import GacError
from gac.profiling.table import Profile
from tests.distributed import work
from tests.distributed.herd import Ended, together


class Silent(Ranks):
    """One of several processes, without communication."""

    def __init__(self, rank: int, count: int, facts: list[dict[str, str]] | None = None) -> None:
        super().__init__()
        self.rank, self.count, self._facts = rank, count, facts

    def gathered(self, value: object) -> list[object]:  # type: ignore[override]
        return list(self._facts or [value])


@pytest.mark.parametrize(("windows", "count"), [(7, 2), (128, 5)])
def test_shares_are_contiguous_and_even(windows: int, count: int) -> None:
    shares = [range(windows)[Silent(rank, count).rows(windows)] for rank in range(count)]
    assert [row for share in shares for row in share] == list(range(windows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_works_are_shared_out_by_size() -> None:
    assert Silent(0, 2).shared_out([4, 1, 1]) == [0, 1, 1]
    assert Silent(1, 2).shared_out([1, 5, 3, 3]) == [0, 0, 1, 1]
    assert Silent(0, 4).shared_out([9]) == [0]


def test_processes_that_differ_are_refused_by_name() -> None:
    ranks = Silent(0, 3, [{"GPU": "H100"}, {"GPU": "H100"}, {"GPU": "H200"}])
    with pytest.raises(GacError, match=r"^GPU H200 on rank 2 of 3, where rank 0 has H100; expected the same GPU"):
        ranks.check_alike({"GPU": "H100"})


def test_alone_nothing_travels() -> None:
    assert ALONE.shared_out([1, 2]) == [0, 0]
    values, module = torch.ones(2), nn.Linear(2, 2)
    assert ALONE.total(values) is values
    assert ALONE.total_at(0, values) is values
    assert ALONE.modules({"head": module})["head"] is module
    assert ALONE.once(lambda: 3) == 3
    assert ALONE.rows(5) == slice(0, 5)


def test_torchrun_says_which_process_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (launch.processes(), launch.rank(), launch.local_rank(), launch.leads()) == (1, 0, 0, True)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (launch.processes(), launch.rank(), launch.local_rank(), launch.leads()) == (8, 5, 1, False)


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
