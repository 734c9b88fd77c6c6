"""A run that is killed resumes, with the same losses and bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trained import Trained

from gac.core.io import home
from gac.healing import heal
from gac.healing import run as run_module
from gac.healing.records import Progress, TrainingBudget
from gac.healing.run import CheckpointFile, DistillationRun, key_of
from tests.compression.applying import logits

KILLED = """
import os, signal, sys
from gac.healing import run

run.INTERVAL = 0.0
run.TIME_SHARE = 1e9
write, left = run.CheckpointFile.write, [int(sys.argv.pop(1))]

def then_killed(self, *arguments):
    write(self, *arguments)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

run.CheckpointFile.write = then_killed
from gac.cli import main
main(sys.argv[1:])
"""


def checkpoints() -> list[Path]:
    return list((home() / "healing").glob("*/*.safetensors")) if (home() / "healing").exists() else []


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int) -> None:
    """Write every checkpoint, and interrupt the run after so many calls of a function."""
    function, left = getattr(owner, name), [after]

    def then_interrupted(*arguments: Any) -> Any:
        result = function(*arguments)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(run_module, "INTERVAL", 0.0)
    monkeypatch.setattr(run_module, "TIME_SHARE", 1e9)
    monkeypatch.setattr(owner, name, then_interrupted)


# After a checkpoint of each phase, and while the divergence of the result is measured.
@pytest.mark.parametrize(
    ("owner", "name", "after"), [(CheckpointFile, "write", 1), (CheckpointFile, "write", 12), (heal, "_divergence", 2)]
)
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    owner: Any, name: str, after: int, learned: Trained, monkeypatch: Any
) -> None:
    small, complete = learned.compressed(), learned.healed()
    before = logits(small)
    with monkeypatch.context() as patch:
        interrupt(patch, owner, name, after)
        with pytest.raises(KeyboardInterrupt):
            learned.heal(small)
    assert torch.equal(logits(small), before) == (owner is CheckpointFile)
    assert len(checkpoints()) == 1
    resumed = learned.heal(learned.compressed())
    assert torch.equal(logits(resumed), logits(complete))
    record, expected = resumed.gac_plan.healed[0], complete.gac_plan.healed[0]
    assert (record.after, record.tokens) == (expected.after, expected.tokens)
    assert checkpoints() == []


@pytest.mark.slow
def test_a_killed_command_ends_like_an_uninterrupted_one(learned: Trained, tmp_path: Path, monkeypatch: Any) -> None:
    arguments = map(str, (*learned.command(tmp_path), "-o", tmp_path / "healed"))
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "home"))
    command = [sys.executable, "-c", KILLED, "9", *arguments]
    killed = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "healed").exists()
    [path] = checkpoints()
    path.with_name(".half").touch()  # as if it was killed while writing
    resumed = learned.heal(tmp_path / "small", against=tmp_path / "dense", tokenizer=None)
    assert list((home() / "healing").iterdir()) == []
    assert torch.equal(logits(resumed), logits(learned.healed()))


def test_a_damaged_checkpoint_is_ignored(learned: Trained, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, CheckpointFile, "write", 1)
        with pytest.raises(KeyboardInterrupt):
            learned.heal(learned.compressed())
    [path] = checkpoints()
    path.write_bytes(path.read_bytes()[:100])
    healed = learned.heal(learned.compressed())
    assert f"the checkpoint of healing in {path} cannot be read, starting afresh" in caplog.text
    assert torch.equal(logits(healed), logits(learned.healed()))


def test_the_key_does_not_depend_on_the_number_of_the_gpu() -> None:
    budget, weights = TrainingBudget(None, 1000, 1e-3, 0.0, False, 0.0, 0), {"weight": torch.ones(2)}
    models = [SimpleNamespace(device=torch.device(name), state_dict=weights.copy) for name in ("cuda:0", "cuda:1")]
    assert len({key_of(model, "dense", {}, budget) for model in models}) == 1


@pytest.mark.parametrize(("other", "tokens"), [(5, 5), (None, 0), (4, 0)])
def test_processes_resume_together_or_not_at_all(other: int | None, tokens: int, learned: Trained) -> None:
    values = {"weight": torch.zeros(2)}
    run: Any = DistillationRun.__new__(DistillationRun)
    run.file = SimpleNamespace(read=lambda: (Progress(1.0, 1.0, tokens=5), {"now": values}))
    run.ranks = SimpleNamespace(gathered=lambda mine: [mine, other])
    restored: list[Any] = []
    run.trainables = SimpleNamespace(restore=restored.append, shard=dict, snapshot=dict, count=2)
    run.text = SimpleNamespace(train=[], heldout=[], names=["a text"])
    run.model, run.start, run._heldout_loss = learned.model, 0.0, lambda: 2.0
    run.start_or_resume()
    assert run.progress.tokens == tokens
    assert restored == ([values] if tokens else [])


def test_snapshots_are_freed(learned: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run_in_place = [], heal.run_in_place
    monkeypatch.setattr(heal, "run_in_place", lambda run: run_in_place(runs.append(run) or run))
    learned.heal(learned.compressed())
    [run] = runs
    assert (run.initial, run.best, run.optimizer_state) == ({}, {}, {})
