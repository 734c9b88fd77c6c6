"""Shares of work, and a single process."""

import pytest
import torch
from torch import nn

from gac.core.distributed import launch
from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.errors import GacError


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
    assert ALONE.shared_out([1, 2]) == [0, 0]


def test_processes_that_differ_are_refused_by_name() -> None:
    ranks = Silent(0, 3, [{"GPU": "H100"}, {"GPU": "H100"}, {"GPU": "H200"}])
    with pytest.raises(GacError) as failure:
        ranks.check_alike({"GPU": "H100"})
    assert str(failure.value).startswith("GPU H200 on rank 2 of 3, where rank 0 has H100; expected the same GPU")


def test_alone_nothing_travels() -> None:
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
