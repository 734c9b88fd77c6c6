"""A checkpoint that is replaced while it is read: one or the other is read, or the error says so."""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import gac
from gac.checkpoint.files import ATTEMPTS, read_unreplaced
from gac.core.errors import CheckpointError
from tests.compression.applying import logits

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
def test_a_model_that_is_replaced_is_loaded_whole(
    step: str, verify: bool, model: LlamaForCausalLM, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    with pytest.raises(CheckpointError) as caught:
        read_unreplaced(saved, replacing)
    assert len(read) == ATTEMPTS
    assert str(caught.value).startswith(f"{saved} was replaced while it was read (5 of 5 times); expected a directory")


def test_an_error_of_a_directory_that_stays_is_raised_once(saved: Path) -> None:
    (saved / "plan.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"plan\.json"):
        gac.load(saved)
    with pytest.raises(CheckpointError, match=r"has no config\.json with a key gac"):
        gac.load(saved.parent / "missing")
