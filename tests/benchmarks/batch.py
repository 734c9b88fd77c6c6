"""Benchmarks side by side on one GPU: all commands of a batch, as many at a time as fit, each with a log of its own.

    python tests/benchmarks/batch.py precision --work DIR --gpu-gb 125

A batch is a file of ``batches/``: a list of tasks, each with

- ``name`` and ``command``, in which ``{work}`` is the directory that everything is written to;
- ``for``: names with lists of values. There is a task for each combination, which both of these are filled in with;
- ``after``: tasks to wait for, by the name or by what the name begins with and ``*``. None of them may have failed;
- ``gpu_gb`` that it takes, 1 where not said, and ``alone`` where nothing may run beside it, as figures of time want it.

Tasks start in the order of the file. The same command goes on where it was stopped; what failed is tried again.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from gac.core.io import atomic_path

BATCHES = Path(__file__).parent / "batches"
POLL = 0.5


@dataclass(frozen=True)
class Task:
    """One command of a batch."""

    name: str
    command: str
    after: tuple[str, ...] = ()
    gpu_gb: float = 1
    alone: bool = False

    def waits_for(self, other: str) -> bool:
        return _is_one_of(other, self.after)


@dataclass(frozen=True, eq=False)
class Running:
    """A task under way."""

    task: Task
    process: subprocess.Popen[bytes]
    begun: float


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def tasks_of(described: Sequence[dict[str, Any]], work: Path) -> Iterator[Task]:
    """The tasks of a batch as its file describes them."""
    for one in described:
        values = one.get("for", {})
        for combination in product(*values.values()):
            filled = {"work": str(work)} | {name: str(value) for name, value in zip(values, combination, strict=True)}
            fields = {name: value for name, value in one.items() if name not in ("for", "after", "name", "command")}
            name, command = (one[field].format_map(filled) for field in ("name", "command"))
            yield Task(name, command, tuple(after.format_map(filled) for after in one.get("after", ())), **fields)


class Batch:
    """Tasks on their way; what has ended is kept in ``WORK/batch.json``, by name: its exit status and seconds."""

    def __init__(self, tasks: Sequence[Task], work: Path, slots: int, gpu_gb: float) -> None:
        self._work, self._slots, self._gpu_gb = work, slots, gpu_gb
        self._state = work / "batch.json"
        ended = json.loads(self._state.read_text()) if self._state.exists() else {}
        self.ended: dict[str, dict[str, float]] = {name: one for name, one in ended.items() if one["status"] == 0}
        self.waiting = [task for task in tasks if task.name not in self.ended]
        self._names = [task.name for task in tasks]
        self.running: list[Running] = []

    def step(self) -> bool:
        """Take note of what has ended and start what fits; False once nothing runs and nothing can be started."""
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            self._end(one.task, one.process.returncode, time.monotonic() - one.begun)
        for task in [task for task in self.waiting if self._ready(task)]:
            if self._fits(task):
                self.waiting.remove(task)
                self._start(task)
        return bool(self.running)

    def stop(self) -> None:
        """End what runs; it counts as not begun."""
        for one in self.running:
            os.killpg(one.process.pid, signal.SIGTERM)
            one.process.wait()

    def _ready(self, task: Task) -> bool:
        return all(
            name in self.ended and not self.ended[name]["status"] for name in self._names if task.waits_for(name)
        )

    def _fits(self, task: Task) -> bool:
        if task.alone or any(one.task.alone for one in self.running):
            return not self.running
        taken = sum(one.task.gpu_gb for one in self.running)
        return not self.running or (len(self.running) < self._slots and taken + task.gpu_gb <= self._gpu_gb)

    def _start(self, task: Task) -> None:
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (1 if task.alone else self._slots)))}
        with (self._work / f"{task.name}.log").open("wb") as log:
            process = subprocess.Popen(
                task.command,
                shell=True,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"PYTHONPATH": ".", **os.environ, **threads},
                start_new_session=True,
            )
        self.running.append(Running(task, process, time.monotonic()))

    def _end(self, task: Task, status: int, seconds: float) -> None:
        self.ended[task.name] = {"status": status, "seconds": round(seconds, 1)}
        print(f"{task.name}: {'done' if status == 0 else f'FAILED ({status})'} in {seconds:.0f} s", flush=True)
        with atomic_path(self._state) as temporary:
            temporary.write_text(json.dumps(self.ended, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch", choices=sorted(path.stem for path in BATCHES.glob("*.json")))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["*"], help="the names of those to run, such as 'smollm2-*'")
    parser.add_argument("--slots", type=int, default=12, help="commands at a time")
    parser.add_argument("--gpu-gb", type=float, default=70)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="what runs then is ended")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    asked = parser.parse_args()
    described = json.loads((BATCHES / f"{asked.batch}.json").read_text(encoding="utf-8"))
    tasks = [task for task in tasks_of(described, asked.work) if _is_one_of(task.name, asked.tasks)]
    if asked.list:
        print("\n".join(f"{task.name}: {task.command}" for task in tasks))
        return
    asked.work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    batch, begun = Batch(tasks, asked.work, asked.slots, asked.gpu_gb), time.monotonic()
    try:
        while batch.step() and time.monotonic() - begun < asked.seconds:
            time.sleep(POLL)
        left = [one.task.name for one in batch.running] + [task.name for task in batch.waiting]
    finally:
        batch.stop()
    failed = [name for name, one in batch.ended.items() if one["status"]]
    named = (", ".join(names) or "none" for names in (failed, left))
    print("{} done; failed: {}; left: {}".format(len(batch.ended) - len(failed), *named))
    raise SystemExit(bool(failed or left))


if __name__ == "__main__":
    main()
