"""Two processes average the gradients of their shares, over gloo."""

from pathlib import Path

import torch

from tests.distributed.herd import Ended, together
from tests.healing import gradients_work as work

WELL = Ended([0, 0], ["", ""], ["", ""])


def test_gradients_are_averaged_with_the_last_part_of_a_batch(tmp_path: Path) -> None:
    assert together(2, work.average, tmp_path / "home", tmp_path) == WELL
    for rank in range(2):
        weight, bias, *mixed = torch.load(tmp_path / f"{rank}.pt")
        assert weight.unique().tolist() == [((2 * 1 + 0) + (2 * 2 + 10)) / 2]
        assert bias.unique().tolist() == [3]
        assert [tensor.unique().tolist() for tensor in mixed] == [[0.5]] * len(mixed)
        assert [tensor.dtype for tensor in mixed] == [dtype for _, dtype in work.SIZES]


def test_no_process_captures_if_one_cannot(tmp_path: Path) -> None:
    assert together(2, work.capture, tmp_path / "home", tmp_path) == WELL
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == ([[3.0] * 3, [4.5] * 3, [4.5] * 3], False)


def test_a_later_pass_is_not_averaged(tmp_path: Path) -> None:
    assert together(2, work.average_once, tmp_path / "home") == WELL


def test_processes_share_heldout_windows(tmp_path: Path) -> None:
    assert together(2, work.look, tmp_path / "home") == WELL
