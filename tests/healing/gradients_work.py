"""The work of each process in tests of averaged gradients."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gac.core.distributed import ranks
from gac.core.distributed.run import this_run
from gac.healing import gradients as module
from gac.healing.gradients import Capturing, Gradients
from gac.healing.losses import mean_loss
from gac.testing.models import tiny_model


def every_check(folder: Path) -> None:
    share_heldout_windows()
    average_once()
    capture(folder)
    average(folder)


def average(folder: Path) -> None:
    """Gradients of two parts of a batch, and means of tensors of two dtypes."""
    ours = this_run()
    weight, bias = (nn.Parameter(torch.zeros(size)) for size in ((4, 3), (4,)))
    gradients = Gradients(lambda ids: (ids @ weight.T + bias).sum(), [weight, bias], Capturing(False), ours)
    parts = [torch.full((2, 3), 1.0 + ours.rank), torch.full((1, 3), 10.0 * ours.rank)]
    losses = [float(gradients.add(part, last=part is parts[-1]).detach()) for part in parts]
    assert losses == [0, 0]
    ranks.BUCKET_BYTES = 24
    mixed = [torch.full(size, float(ours.rank), dtype=dtype) for size, dtype in SIZES]
    ours.average(mixed)
    assert [tensor.shape for tensor in mixed] == [torch.Size(size) for size, _ in SIZES]
    torch.save([weight.grad, bias.grad, *mixed], folder / f"averaged-{ours.rank}.pt")


def capture(folder: Path) -> None:
    """Passes that both processes can capture, and then others that the second one cannot."""
    ours, weight, capturing = this_run(), nn.Parameter(torch.zeros(3)), Capturing(True)

    class Captured:
        def __init__(self, run: Any, inputs: Any) -> None:
            if ours.rank and len(inputs[0]) > 2:
                raise RuntimeError("no room")
            self.run = lambda inputs: run(*inputs)

    module._CapturedPass = Captured  # type: ignore[assignment, misc]
    gradients = Gradients(lambda rows: (rows @ weight).sum(), [weight], capturing, ours)
    means = []
    for rows in (2, 3, 3):
        weight.grad = None
        gradients.zero()
        gradients.add(torch.full((rows, 3), 1.0 + ours.rank))
        assert weight.grad is not None
        means.append(weight.grad.tolist())
    torch.save((means, capturing.enabled), folder / f"captured-{ours.rank}.pt")


def average_once() -> None:
    """Average one pass after another; a pass after that is not averaged."""
    ours, weight = this_run(), nn.Parameter(torch.zeros(2))
    for _ in range(2):
        weight.grad = None
        with ours.averaging([weight]):
            (weight * ours.rank).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [0.5, 0.5]
    (weight * ours.rank).sum().backward()
    assert weight.grad.tolist() == [0.5 + ours.rank] * 2


def share_heldout_windows() -> None:
    """The loss on windows that both processes share, and the passes of each."""
    ours, dense, small = this_run(), tiny_model(), tiny_model()
    with torch.no_grad():
        small.lm_head.weight.mul_(2)
    windows = torch.randint(dense.config.vocab_size, (5, 16), generator=torch.Generator().manual_seed(0))
    labels, runs = torch.linspace(0, 1, 5), []
    small.register_forward_hook(lambda *_arguments: runs.append(1))
    for batch, passes in ((1, 3), (2, 2), (5, 1)):
        alone = mean_loss(small, dense, windows, batch, labels)
        runs.clear()
        assert mean_loss(small, dense, windows, batch, labels, ours) == alone
        assert len(runs) == passes


SIZES = [((2, 2), torch.float32), ((3,), torch.float64), ((2,), torch.float32), ((), torch.float32)]
SIZES += [((9,), torch.float32), ((1,), torch.float64)]
