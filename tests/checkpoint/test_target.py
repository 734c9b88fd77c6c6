"""Directories that are there whole or not at all, and checkpoints that are replaced while they are read."""

import importlib
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaForCausalLM

import gac
from gac.checkpoint.files import ATTEMPTS, read_unreplaced
from gac.core.errors import CheckpointError
from tests.compression.applying import logits


def test_a_directory_in_use_is_left_alone(model: LlamaForCausalLM, saved: Path) -> None:
    (saved / "mine").write_text("kept")
    with pytest.raises(CheckpointError, match=f"{saved} holds a compressed checkpoint; .* overwrite=True"):
        gac.save(model, saved)
    assert (saved / "mine").exists()


def test_overwrite_replaces_a_checkpoint(model: LlamaForCausalLM, saved: Path) -> None:
    (saved / "old").write_text("gone")
    torch.nn.init.ones_(model.lm_head.weight)
    gac.save(model, saved, overwrite=True)
    assert torch.equal(logits(gac.load(saved)), logits(model))
    assert not (saved / "old").exists()
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize("killed", [False, True])
def test_the_old_is_kept_where_replacing_fails(killed: bool, model: Any, saved: Path, monkeypatch: Any) -> None:
    """A killed process leaves the old checkpoint under its backup name."""
    rename, before = Path.rename, {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise KeyboardInterrupt if killed else OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(KeyboardInterrupt if killed else CheckpointError):
        gac.save(model, saved, overwrite=True)
    [left] = saved.parent.iterdir()
    assert (left.suffix == ".old") if killed else (left == saved)
    assert {path.name: path.read_bytes() for path in left.iterdir()} == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_never_replaced(model: LlamaForCausalLM, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("kept")
    for target in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(CheckpointError, match=f"{target} exists and is no compressed checkpoint; expected a new"):
            gac.save(model, target, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_link_to_an_empty_directory_is_followed(model: LlamaForCausalLM, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    gac.save(model, tmp_path / "link")
    gac.load(tmp_path / "saved")
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "saved"]


@pytest.fixture(params=["weights", "move"])
def full_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file of the process may grow beyond 64 kB, so weights cannot be written; or the last step fails."""

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if request.param == "move":
        monkeypatch.setattr("gac.checkpoint.target._move", Mock(side_effect=OSError(28, "No space left on device")))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_failure_leaves_nothing_behind(model: LlamaForCausalLM, saved: Path, full_disk: None) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(CheckpointError, match=f"^{saved} cannot be written: "):
        gac.save(model, saved, overwrite=True)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_a_name_that_is_not_utf8_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its name is not UTF-8"):
        gac.save(model, tmp_path / "small-\udcff")
    assert not list(tmp_path.iterdir())


loading = importlib.import_module("gac.checkpoint.load")


def when_called(monkeypatch: pytest.MonkeyPatch, name: str, times: int, action: Callable[[], Any]) -> None:
    """Do something before a step of loading, the first times that it is taken."""
    step, left = getattr(loading, name), [None] * times

    def stepped(*given: Any, **options: Any) -> Any:
        if left:
            left.pop()
            action()
        return step(*given, **options)

    monkeypatch.setattr(loading, name, stepped)


@pytest.mark.parametrize(("step", "verify"), [("plan_text", False), ("weight_files", True), ("open_tensors", False)])
def test_what_is_replaced_is_loaded_whole(step: str, verify: bool, model: Any, saved: Path, monkeypatch: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    when_called(monkeypatch, step, 1, lambda: gac.save(model, saved, overwrite=True))
    assert torch.equal(logits(gac.load(saved, verify=verify)), logits(model))


def test_a_directory_that_is_always_replaced_is_named(saved: Path, tmp_path: Path) -> None:
    other = shutil.copytree(saved, tmp_path / "other")
    read: list[int] = []

    def replacing() -> None:
        read.append(1)
        saved.rename(tmp_path / "old")
        other.rename(saved)
        (tmp_path / "old").rename(other)

    with pytest.raises(CheckpointError, match=rf"^{saved} was replaced while it was read \(5 of 5 times\)"):
        read_unreplaced(saved, replacing)
    assert len(read) == ATTEMPTS
