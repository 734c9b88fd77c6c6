"""Pairs of a split model that share their first GEMM gather what it gives at once."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from gac.runtime import shared_gemm
from gac.runtime.modules import LowRankLinear
from gac.runtime.ranks import Ranks
from gac.runtime.shared_gemm import share_gemm

READ = 16


@dataclass(frozen=True, eq=False)
class Twins(Ranks):
    """Two processes that have the same; ``widths`` has the columns of each gather."""

    widths: list[int] = field(default_factory=list)

    def stacked(self, part: Tensor) -> Tensor:
        self.widths.append(part.shape[-1])
        return torch.stack([part, part])


def weights(ranks: Ranks, dense: int) -> nn.ModuleDict:
    """Pairs of ranks 8 and 12, of whose first factors a process has half the rows, and a dense weight between them."""
    found = {"q": LowRankLinear(READ, 8, 10), "k": nn.Linear(READ, dense), "v": LowRankLinear(READ, 12, 9)}
    for pair in (found["q"], found["v"]):
        pair.first = nn.Linear(READ, pair.rank // 2, bias=False)
        nn.init.normal_(pair.second.weight)
        nn.init.normal_(pair.second.bias)
        pair.ranks = ranks
    return nn.ModuleDict(found).requires_grad_(False)


@pytest.mark.parametrize(
    ("dense", "apart", "gathers"),
    [
        (6, 100, [4 + 6]),  # between both in the GEMM
        (20, 100, [4 + 6]),  # behind them
        (20, 6, [4, 6]),  # the second pair's part runs by itself
    ],
)
def test_what_pairs_gather_from_one_gemm_is_gathered_at_once(
    dense: int, apart: int, gathers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_gemm, "apart_from", lambda rows: apart)
    ranks = Twins(None, 0, 2, torch.device("cpu"))
    model, x = weights(ranks, dense), torch.randn(2, 5, READ)
    due = [one(x) for one in model.values()]
    assert ranks.widths == [4, 6]
    share_gemm(model, ["q", "k", "v"])
    for _ in range(2):
        ranks.widths.clear()
        for one, wanted in zip(model.values(), due, strict=True):
            torch.testing.assert_close(one(x), wanted)
        assert ranks.widths == gathers


def test_another_input_is_gathered_anew() -> None:
    ranks = Twins(None, 0, 2, torch.device("cpu"))
    model, inputs = weights(ranks, 20), torch.randn(2, 3, READ)
    due = [model["q"](inputs[0]), model["v"](inputs[1])]
    share_gemm(model, ["q", "k", "v"])
    ranks.widths.clear()
    torch.testing.assert_close([model["q"](inputs[0]), model["v"](inputs[1])], due)
    assert ranks.widths == [10, 10]
