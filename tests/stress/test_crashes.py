"""Jobs that are killed, run out of room, or run beside themselves: the next run finishes with the same result.

``tests/benchmarks/crashes.py`` does the same as often as it is told, at moments too.
"""

import errno
import os
import random
import shutil
import stat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from gac.core.errors import ProfileError, StatisticsError
from gac.measurement.store import read_arrays, write_tensors
from gac.profiling.sweeps.journal import Journal
from gac.profiling.sweeps.sweep import run_sweep
from gac.profiling.table import Profile
from tests.headers import make_header
from tests.stress import harming
from tests.stress.harming import KILLED, Fault, Job, result, run, timings
from tests.stress.victims import JOBS, POINTS, CountingMeasurer, Harm


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    harming.make_world(folder)
    return folder


@pytest.fixture(scope="module")
def clean_runs(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return {job: harming.undisturbed(job, world, tmp_path_factory.mktemp(job)) for job in JOBS}


@pytest.mark.parametrize(
    ("fault", "outcomes"),
    [
        (harming.killed_twice, {KILLED, "done"}),
        (harming.full_disk, {"ProfileError", "StatisticsError", "CheckpointError"}),
        (harming.two_at_once, {"done / done", "ProfileError / done", "CheckpointError / done"}),
    ],
)
@pytest.mark.parametrize("job", JOBS)
def test_a_harmed_job_is_finished_next_time(job: str, fault: Fault, outcomes: set[str], clean_runs: Any) -> None:
    assert harming.tried(clean_runs[job], fault, trials=1, seed=0)["outcomes"].keys() <= outcomes


@pytest.mark.parametrize("seed", range(2))
def test_at_most_one_timing_is_lost(seed: int, world: Path, tmp_path: Path, clean_runs: dict[str, Job]) -> None:
    call = random.Random(f"timing {seed}").randint(1, clean_runs["profile"].calls)
    run("profile", world, tmp_path, Harm(at_call=call))
    kept, taken = timings(tmp_path)
    assert taken - 1 <= kept <= taken


@pytest.mark.parametrize("seed", range(3))
def test_a_profile_that_ends_anywhere_goes_on_there(seed: int, tmp_path: Path, clean_runs: dict[str, Job]) -> None:
    path = tmp_path / "gpu.jsonl"
    run_sweep(POINTS, path, CountingMeasurer(tmp_path / "first"), make_header(), progress=False)
    whole = path.read_bytes()
    cut = random.Random(seed).randint(0, len(whole))
    path.write_bytes(whole[:cut])
    lost = whole[whole.rfind(b"\n", 0, cut) + 1 :].count(b'"row"') + whole[cut:].count(b'"again"')
    timed = run_sweep(POINTS, path, CountingMeasurer(tmp_path / "again"), make_header(), progress=False)
    assert timed <= lost + 1
    assert result("profile", tmp_path) == clean_runs["profile"].result


@pytest.mark.parametrize("job", JOBS)
def test_the_wall_clock_decides_nothing(job: str, world: Path, tmp_path: Path, clean_runs: dict[str, Job]) -> None:
    assert run(job, world, tmp_path, Harm(wild_clock=True)).outcome == "done"
    assert result(job, tmp_path) == clean_runs[job].result


def test_a_profile_is_resumed_at_an_earlier_date(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    for date, points in (("2031-01-01", POINTS[:9]), ("1970-01-01", POINTS)):
        header = msgspec.structs.replace(make_header(), date=date)
        run_sweep(points, path, CountingMeasurer(tmp_path / "counted"), header, passes=1, progress=False)
    assert len(Profile.load(path).measurements) == len(POINTS)


# --- places that cannot be written, and files that were damaged -------------------------------------------------------

NOWHERE = Path("/proc/gac")  # not even root can make a file there


def test_where_files_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StatisticsError, match=r"cannot be written to /proc/gac/losses\.safetensors: .* GAC_HOME"):
        write_tensors(NOWHERE / "losses.safetensors", {"loss": torch.zeros(1)})
    with pytest.raises(ProfileError, match=r"profile /proc/gac/gpu\.jsonl cannot be written: No such file"):
        Journal(NOWHERE / "gpu.jsonl", make_header()).__enter__()

    def sync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("os.fsync", sync)
    write_tensors(tmp_path / "losses.safetensors", {"loss": torch.zeros(1)})
    assert read_arrays(tmp_path / "losses.safetensors")["loss"].tolist() == [0.0]


def test_a_file_system_without_locks_and_a_disk_that_fails_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    journal = Journal(tmp_path / "gpu.jsonl", make_header())
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
        with pytest.raises(ProfileError, match=r"gpu\.jsonl cannot be written: No locks available; expected a"):
            journal.__enter__()
    failing = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    with pytest.raises(ProfileError, match=r"gpu\.jsonl cannot be written to the end: Input/output"), journal:
        monkeypatch.setattr("os.fsync", failing)


@pytest.mark.parametrize("what", ["losses", "boundary"])
def test_statistics_that_were_damaged_are_named(what: str, world: Path, tmp_path: Path) -> None:
    assert run("allocate", world, tmp_path).outcome == "done"
    store = next((tmp_path / "home" / "statistics").iterdir())
    damaged = next(store.glob("losses-*-0001.safetensors"))
    if what == "boundary":
        shutil.rmtree(store)
        store.mkdir()
        damaged = store / "boundary.safetensors"
    damaged.write_bytes(b"torn")
    outcome = run("allocate", world, tmp_path).outcome
    assert outcome.startswith(f"StatisticsError: saved results {damaged} cannot be read")
    assert outcome.endswith("expected a file as GAC wrote it. Delete it: what it held is computed again.")


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr("os.fsync", lambda _handle: seen.append((tmp_path / "x.safetensors").exists()))
    write_tensors(tmp_path / "x.safetensors", {"x": torch.zeros(4)})
    assert seen == [False, True]  # the content, and then the directory that holds the name
