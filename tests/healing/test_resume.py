"""A run that is killed goes on: the same losses, the same bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trained import TOKENS, Trained

import gac
from gac.core.io import home
from gac.healing import checkpoint, heal
from gac.healing.checkpoint import CheckpointFile, key_of
from gac.healing.records import Progress, TrainingBudget
from gac.healing.run import DistillationRun
from tests.compression.applying import logits

KILLED = """
import os, signal, sys
from gac.healing import checkpoint

checkpoint.INTERVAL = 0.0
checkpoint.TIME_SHARE = 1e9
write, left = checkpoint.CheckpointFile.write, [int(sys.argv.pop(1))]

def then_killed(self, *given):
    write(self, *given)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint.CheckpointFile.write = then_killed
from gac.cli import main
main(sys.argv[1:])
"""


def states() -> list[Path]:
    return list((home() / "healing").glob("*/*.safetensors")) if (home() / "healing").exists() else []


def stopped(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Keep a state whenever one can be kept, and interrupt the run behind so many."""
    write, left = CheckpointFile.write, [after]

    def then_interrupted(self: Any, *given: Any) -> None:
        write(self, *given)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "INTERVAL", 0.0)
    monkeypatch.setattr(checkpoint, "TIME_SHARE", 1e9)
    monkeypatch.setattr(CheckpointFile, "write", then_interrupted)


@pytest.mark.parametrize("after", [1, 2, 12])
def test_an_interrupted_run_ends_as_one_that_was_not(after: int, learned: Trained, monkeypatch: Any) -> None:
    small = learned.compressed()
    given = logits(small)
    whole = learned.heal(learned.compressed())
    with monkeypatch.context() as patch:
        stopped(patch, after)
        with pytest.raises(KeyboardInterrupt):
            learned.heal(small)
    assert torch.equal(logits(small), given)
    assert len(states()) == 1
    again = learned.heal(small)
    assert torch.equal(logits(again), logits(whole))
    one, other = again.gac_plan.healed[0], whole.gac_plan.healed[0]
    assert (one.after, one.tokens) == (other.after, other.tokens)
    assert states() == []


def test_a_killed_command_ends_as_one_that_was_not(learned: Trained, tmp_path: Path, monkeypatch: Any) -> None:
    learned.model.save_pretrained(tmp_path / "dense")
    learned.tokenizer.save_pretrained(tmp_path / "dense")
    gac.save(learned.compressed(), tmp_path / "small", tokenizer=learned.tokenizer)
    arguments = [str(tmp_path / "small"), "--against", str(tmp_path / "dense"), "--tokens", str(TOKENS)]
    arguments = ["heal", *arguments, "--learning-rate", "0.001", "-o", str(tmp_path / "healed")]
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "home"))
    command = [sys.executable, "-c", KILLED, "9", *arguments]
    killed = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "healed").exists()
    [path] = states()
    path.with_name(".half").touch()  # as where it is killed while it writes
    again = learned.heal(tmp_path / "small", against=tmp_path / "dense", tokenizer=None)
    assert list((home() / "healing").iterdir()) == []
    assert torch.equal(logits(again), logits(learned.heal(learned.compressed())))


def test_a_damaged_state_is_said_and_left(learned: Trained, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    small = learned.compressed()
    with monkeypatch.context() as patch:
        stopped(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            learned.heal(small)
    [path] = states()
    path.write_bytes(path.read_bytes()[:100])
    again = learned.heal(small)
    assert f"the checkpoint of healing in {path} cannot be read, starting afresh" in caplog.text
    assert torch.equal(logits(again), logits(learned.heal(learned.compressed())))


def test_a_run_that_is_killed_while_it_measures_what_it_gave_goes_on(learned: Trained, monkeypatch: Any) -> None:
    whole, small, measure = learned.heal(learned.compressed()), learned.compressed(), heal._divergence
    measured: list[float] = []

    def then_interrupted(*given: Any) -> float:
        if measured:
            raise KeyboardInterrupt
        measured.append(measure(*given))
        return measured[0]

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "INTERVAL", 0.0)
        patch.setattr(checkpoint, "TIME_SHARE", 1e9)
        patch.setattr(heal, "_divergence", then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            learned.heal(small)
    assert len(states()) == 1
    assert torch.equal(logits(learned.heal(learned.compressed())), logits(whole))
    assert not states()


def test_processes_read_one_state_whatever_the_numbers_of_their_gpus() -> None:
    work, weights = TrainingBudget(None, 1000, 1e-3, 0.0, False, 0.0, 0), {"weight": torch.ones(2)}
    models = [SimpleNamespace(device=torch.device(name), state_dict=weights.copy) for name in ("cuda:0", "cuda:1")]
    assert len({key_of(model, "dense", {}, work) for model in models}) == 1


@pytest.mark.parametrize(("others", "tokens"), [(5, 5), (None, 0), (4, 0)])
def test_processes_go_on_together_or_begin_together(others: int | None, tokens: int, learned: Trained) -> None:
    values = {"weight": torch.zeros(2)}
    found = Progress(1.0, 1.0, tokens=5), {"now": values}
    healing = DistillationRun.__new__(DistillationRun)
    healing.file = SimpleNamespace(read=lambda: found)  # type: ignore[assignment]
    healing.ranks = SimpleNamespace(gathered=lambda own: [own, others])  # type: ignore[assignment]
    restored: list[Any] = []
    healing.trainables = SimpleNamespace(restore=restored.append, shard=dict, snapshot=dict, count=2)  # type: ignore[assignment]
    healing.text = SimpleNamespace(train=[], heldout=[], names=["a text"])  # type: ignore[assignment]
    healing.model, healing.start, healing._heldout_loss = learned.model, 0.0, lambda: 2.0  # type: ignore[method-assign]
    healing.start_or_resume()
    assert healing.progress.tokens == tokens
    assert restored == ([values] if tokens else [])


def test_what_was_best_is_not_held_any_longer(learned: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    healings, train = [], heal.run_in_place
    monkeypatch.setattr(heal, "run_in_place", lambda healing: train(healings.append(healing) or healing))
    learned.heal(learned.compressed())
    [healing] = healings
    assert (healing.initial, healing.best, healing.optimizer_state) == ({}, {}, {})
