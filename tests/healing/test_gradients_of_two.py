"""Two processes average the gradients of their shares, over gloo."""

from pathlib import Path

import pytest
import torch

from tests.distributed.herd import Ended, together
from tests.healing import gradients_work as work


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    assert together(2, work.every_check, tmp_path / "home", tmp_path) == Ended([0, 0], ["", ""], ["", ""])
    for rank in range(2):
        weight, bias, *mixed = torch.load(tmp_path / f"averaged-{rank}.pt")
        assert weight.unique().tolist() == [((2 * 1 + 0) + (2 * 2 + 10)) / 2]
        assert bias.unique().tolist() == [3]
        assert [tensor.unique().tolist() for tensor in mixed] == [[0.5]] * len(mixed)
        assert [tensor.dtype for tensor in mixed] == [dtype for _, dtype in work.SIZES]
        # No process captures the shape that the second one cannot.
        assert torch.load(tmp_path / f"captured-{rank}.pt") == ([[3.0] * 3, [4.5] * 3, [4.5] * 3], False)
