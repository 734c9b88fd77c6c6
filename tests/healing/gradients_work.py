"""What each process of a run of several does, where gradients are averaged over them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gac.core.distributed import ranks
from gac.core.distributed.run import this_run
from gac.healing import gradients
from gac.healing.gradients import Captures, Gradients
from gac.healing.logits import mean_loss
from gac.testing.models import tiny_model


def average(folder: Path) -> None:
    """Gradients of two parts of a batch that every process has its own share of, and means of tensors of two types."""
    ours = this_run()
    weight, bias = (nn.Parameter(torch.zeros(size)) for size in ((4, 3), (4,)))
    found = Gradients(lambda ids: (ids @ weight.T + bias).sum(), [weight, bias], Captures(False), ours)
    parts = [torch.full((2, 3), 1.0 + ours.rank), torch.full((1, 3), 10.0 * ours.rank)]
    losses = [float(found.add(one, last=one is parts[-1]).detach()) for one in parts]
    assert losses == [0, 0]
    ranks.BUCKET_BYTES = 24
    mixed = [torch.full(size, float(ours.rank), dtype=one) for size, one in SIZES]
    ours.average(mixed)
    assert [one.shape for one in mixed] == [torch.Size(size) for size, _ in SIZES]
    torch.save([weight.grad, bias.grad, *mixed], folder / f"{ours.rank}.pt")


def capture(folder: Path) -> None:
    """Runs that can be captured in both processes, and then others that cannot in the second one."""
    ours, weight, captures = this_run(), nn.Parameter(torch.zeros(3)), Captures(True)

    class Captured:
        def __init__(self, run: Any, given: Any) -> None:
            if ours.rank and len(given[0]) > 2:
                raise RuntimeError("no room")
            self.run = lambda given: run(*given)

    gradients._Captured = Captured  # type: ignore[assignment, misc]
    found = Gradients(lambda rows: (rows @ weight).sum(), [weight], captures, ours)
    means = []
    for rows in (2, 3, 3):
        weight.grad = None
        found.begin()
        found.add(torch.full((rows, 3), 1.0 + ours.rank))
        assert weight.grad is not None
        means.append(weight.grad.tolist())
    torch.save((means, captures.on), folder / f"{ours.rank}.pt")


def look() -> None:
    """The loss on windows that both processes share, and how often each runs its model for it."""
    ours, dense, small = this_run(), tiny_model(), tiny_model()
    with torch.no_grad():
        small.lm_head.weight.mul_(2)
    windows = torch.randint(dense.config.vocab_size, (5, 16), generator=torch.Generator().manual_seed(0))
    labels, runs = torch.linspace(0, 1, 5), []
    small.register_forward_hook(lambda *_given: runs.append(1))
    for at_once, each in ((1, 3), (2, 2), (5, 1)):
        alone = mean_loss(small, dense, windows, at_once, labels)
        runs.clear()
        assert mean_loss(small, dense, windows, at_once, labels, ours) == alone
        assert len(runs) == each


SIZES = [((2, 2), torch.float32), ((3,), torch.float64), ((2,), torch.float32), ((), torch.float32)]
SIZES += [((9,), torch.float32), ((1,), torch.float64)]


def once_each() -> None:
    """Nothing is left at parameters that would average them again."""
    ours, weight = this_run(), nn.Parameter(torch.zeros(2))
    for _ in range(2):
        weight.grad = None
        with ours.averaging([weight]):
            (weight * ours.rank).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [0.5, 0.5]
    (weight * ours.rank).sum().backward()
    assert weight.grad.tolist() == pytest.approx([0.5 + ours.rank] * 2)
