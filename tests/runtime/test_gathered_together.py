"""Pairs of a split model that share their first GEMM gather what it gives at once."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from gac.runtime.fusion import shared_gemm
from gac.runtime.fusion.shared_gemm import share_gemm
from gac.runtime.modules import LowRankLinear
from gac.runtime.parallel.ranks import Ranks

READ, SIZE = 16, 2


class Meeting:
    """Where processes, which are threads here, leave what they have for the others; ``widths``: of each gather."""

    def __init__(self) -> None:
        self.barrier, self.left, self.widths = threading.Barrier(SIZE), [torch.empty(0)] * SIZE, list[int]()


@dataclass(frozen=True, eq=False)
class Threads(Ranks):
    """Processes that meet."""

    meeting: Meeting

    def stacked(self, part: Tensor) -> Tensor:
        self.meeting.left[self.rank] = part
        self.meeting.barrier.wait(20)
        found = torch.stack(self.meeting.left)
        if self.meeting.barrier.wait(20) == 0:
            self.meeting.widths.append(part.shape[-1])
        return found


def weights(dense: int) -> nn.ModuleDict:
    """Pairs of ranks 8 and 12, and a dense weight between them."""
    found = {"q": LowRankLinear(READ, 8, 10), "k": nn.Linear(READ, SIZE * dense), "v": LowRankLinear(READ, 12, 9)}
    for one in nn.ModuleDict(found).parameters():
        nn.init.normal_(one)
    return nn.ModuleDict(found).requires_grad_(False)


def part_of(whole: nn.ModuleDict, ranks: Ranks) -> nn.ModuleDict:
    """What a process has: its rows of first factors, and of the dense weight."""
    model = copy.deepcopy(whole)
    for weight in model.values():
        first = shared_gemm.first_of(weight)
        for parameter in first.parameters():
            parameter.data = parameter.data.chunk(SIZE)[ranks.rank].clone()
        first.out_features //= SIZE
        if isinstance(weight, LowRankLinear):
            weight.gathers_from = ranks
    share_gemm(model, ["q", "k", "v"])
    return model


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("dense", "apart", "gathers"),
    [
        (6, 100, [4 + 6]),  # between both in the GEMM
        (20, 100, [4 + 6]),  # behind them
        (20, 6, [4, 6]),  # the second pair's part runs by itself
    ],
)
def test_what_pairs_gather_from_one_gemm_is_gathered_at_once(
    dense: int, apart: int, gathers: list[int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_gemm, "apart_from", lambda rows: apart)
    whole, meeting, inputs = weights(dense), Meeting(), torch.randn(2, 1, rows, READ)
    models = [part_of(whole, Threads(None, rank, SIZE, torch.device("cpu"), meeting)) for rank in range(SIZE)]
    for x in inputs:
        meeting.widths.clear()
        with ThreadPoolExecutor(SIZE) as threads:
            found = list(threads.map(lambda model, x=x: [one(x) for one in model.values()], models))
        assert meeting.widths == gathers
        for rank, ours in enumerate(found):
            due = whole["q"](x), whole["k"](x).chunk(SIZE, -1)[rank], whole["v"](x)
            torch.testing.assert_close(ours, [*due])
