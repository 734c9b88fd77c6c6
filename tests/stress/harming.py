"""Runs a job of ``tests.stress.victims`` in a process of its own, harms it, and looks at what it leaves."""

import hashlib
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gac
from gac.measurement.store import read_tensors
from gac.profiling.table import Profile
from tests.stress import victims
from tests.stress.victims import Harm, serve

_context = multiprocessing.get_context("forkserver")  # forks a process that has torch loaded and does nothing else
_context.set_forkserver_preload(
    [
        "tests.stress.victims",
        "gac.api",
        "gac_extensions.baselines.rules",
        "msgspec",
        "pydantic.dataclasses",
        "pydantic.type_adapter",
    ]
)

KILLED = "killed"
LEAST_FILE = 200  # what the tests themselves write is smaller


@dataclass(frozen=True)
class Ended:
    """End of a process: ``done``, a GacError in words, or ``killed``; and how many calls it made until then."""

    outcome: str
    calls: int = 0


class Victim:
    """A process that runs a job; ``end`` waits for it."""

    def __init__(self, job: str, world: Path, trial: Path, harm: Harm | None = None) -> None:
        trial.mkdir(exist_ok=True)
        self._said, theirs = _context.Pipe(duplex=False)
        self._process = _context.Process(target=serve, args=(job, world, trial, harm or Harm(), theirs))
        self._process.start()
        theirs.close()
        try:
            assert self._said.recv() == "ready"
        except EOFError:
            self._said.close()  # killed by its very first calls

    def end(self, kill_after: float | None = None) -> Ended:
        """Wait for it, or for so many seconds and kill it.

        Raises:
            AssertionError: it ended by another exception than a GacError.
        """
        if kill_after is not None:
            time.sleep(kill_after)
            self._process.kill()
        try:
            ended = Ended(*self._said.recv())
        except (EOFError, OSError):
            ended = Ended(KILLED)
        self._process.join()
        assert ended.outcome != KILLED or self._process.exitcode == -9, f"exit status {self._process.exitcode}"
        return ended


def make_world(world: Path) -> None:
    """Make the inputs of the jobs in a process of its own."""
    process = _context.Process(target=victims.make_world, args=(world,))
    process.start()
    process.join()
    assert process.exitcode == 0


def run(job: str, world: Path, trial: Path, harm: Harm | None = None) -> Ended:
    return Victim(job, world, trial, harm).end()


@dataclass(frozen=True)
class Job:
    """A job, what comes of it, and what it takes: calls, seconds, and bytes of its largest file and of all."""

    name: str
    world: Path
    result: object
    calls: int
    seconds: float
    largest: int
    total: int


def undisturbed(name: str, world: Path, trial: Path) -> Job:
    """A job that nothing happens to."""
    victim, begun = Victim(name, world, trial), time.monotonic()
    ended = victim.end()
    seconds = time.monotonic() - begun
    assert ended.outcome == "done"
    sizes = [path.stat().st_size for path in trial.rglob("*") if path.is_file()]
    return Job(name, world, result(name, trial), ended.calls, seconds, max(sizes), sum(sizes))


def check_whole(trial: Path) -> None:
    """Whatever has its final name can be read to its end; hidden files and directories are nobody's."""
    for path in sorted(trial.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(trial).parts):
            continue
        if path.suffix == ".jsonl" and b"\n" in path.read_bytes():
            Profile.load(path)
        elif path.name == "plan.json":
            gac.Plan.load(path)
        elif path.suffix == ".safetensors":
            read_tensors(path, torch.device("cpu"))
        elif path.name == "small":
            gac.load(path)


def result(job: str, trial: Path) -> object:
    """The result of a job, in a form that can be compared."""
    if job == "profile":
        measured = Profile.load(trial / "gpu.jsonl").measurements
        return {row.point: (row.passes, row.launches) for row in measured}
    if job == "allocate":
        return (trial / "plan.json").read_bytes()
    files = sorted((trial / "small").iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def timings(trial: Path) -> tuple[int, int]:
    """Timings in the profile, passes and sentinels, and timings taken in all runs."""
    counted = victims.counted(trial)
    taken = counted.stat().st_size if counted.exists() else 0
    path = trial / "gpu.jsonl"
    if not path.exists() or b"\n" not in path.read_bytes():
        return 0, taken
    profile = Profile.load(path)
    stored = sum(len(row.passes) for row in profile.measurements) + sum(map(len, profile.sentinels.values()))
    return stored, taken


def killed_at_a_call(job: Job, trial: Path, draw: random.Random) -> str:
    return run(job.name, job.world, trial, Harm(at_call=draw.randint(1, job.calls))).outcome


def killed_twice(job: Job, trial: Path, draw: random.Random) -> str:
    """The second time, what the first left is there."""
    killed_at_a_call(job, trial, draw)
    return killed_at_a_call(job, trial, draw)


def full_disk(job: Job, trial: Path, draw: random.Random) -> str:
    return run(job.name, job.world, trial, Harm(largest_file=draw.randint(LEAST_FILE, job.largest))).outcome


def two_at_once(job: Job, trial: Path, draw: random.Random) -> str:
    first = Victim(job.name, job.world, trial)
    time.sleep(draw.uniform(0, 0.5 * job.seconds))
    second = Victim(job.name, job.world, trial)
    return " / ".join(sorted(first.end().outcome.partition(":")[0] for first in (first, second)))


Fault = Callable[[Job, Path, random.Random], str]
"""It harms a job once, and says how its process ended."""


def tried(job: Job, fault: Fault, trials: int, seed: int) -> dict[str, Any]:
    """Harm a job so often, and run it again each time.

    Raises:
        AssertionError: a file is torn, the second run fails, or its result is another.
    """
    outcomes: Counter[str] = Counter()
    lost = []
    for number in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            trial = Path(folder) / "trial"
            outcome = fault(job, trial, random.Random(f"{seed} {job.name} {fault.__name__} {number}"))
            outcomes[outcome.partition(":")[0]] += 1
            check_whole(trial)
            stored, taken = timings(trial)
            lost.append(taken - stored)
            again = run(job.name, job.world, trial).outcome
            assert again == "done", f"{job.name}, {fault.__name__}, trial {number}: {outcome}, and then {again}"
            assert result(job.name, trial) == job.result, f"{job.name}, {fault.__name__}, trial {number}"
    report = {"trials": trials, "outcomes": dict(sorted(outcomes.items())), "same_result": trials}
    return report | ({"most_timings_lost": max(lost)} if job.name == "profile" else {})
