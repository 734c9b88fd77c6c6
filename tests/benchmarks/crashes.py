"""Kill jobs, fill disks, and run jobs beside themselves many times; count what came back and what was lost.

    python -m tests.benchmarks.crashes --trials 200 --output crashes.json

The tests do a handful of each (``tests/stress/test_crashes.py``). As root, disks are tmpfs mounts of a random size;
else files may not grow beyond a random size.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.stress.harming import (
    KILLED,
    LEAST_FILE,
    Job,
    Victim,
    check_whole,
    make_world,
    result,
    run,
    timings,
    undisturbed,
)
from tests.stress.victims import JOBS, Harm, counted


def killed_at_a_call(job: Job, trial: Path, draw: random.Random) -> str:
    return run(job.name, job.world, trial, Harm(at_call=draw.randint(1, job.calls))).outcome


def killed_at_a_moment(job: Job, trial: Path, draw: random.Random) -> str:
    return Victim(job.name, job.world, trial).end(kill_after=draw.uniform(0, job.seconds)).outcome


def killed_twice(job: Job, trial: Path, draw: random.Random) -> str:
    killed_at_a_call(job, trial, draw)
    return killed_at_a_moment(job, trial, draw)


def killed_when_all_is_there(job: Job, trial: Path, draw: random.Random) -> str:
    """What the first run wrote is kept by the second, or replaced."""
    run(job.name, job.world, trial)
    return killed_at_a_call(job, trial, draw)


def full_disk(job: Job, trial: Path, draw: random.Random) -> str:
    return run(job.name, job.world, trial, Harm(largest_file=draw.randint(LEAST_FILE, job.largest))).outcome


def full_tmpfs(job: Job, trial: Path, draw: random.Random) -> str:
    """What was written to the full disk is copied to a larger one, where the job goes on."""
    size = max(4096, draw.randint(0, job.total) // 4096 * 4096)
    disk = trial.with_name("disk")
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        outcome = run(job.name, job.world, disk).outcome
        shutil.copytree(disk, trial)
    finally:
        subprocess.run(["umount", disk], check=True)
    if job.name == "profile":
        counted(disk).rename(counted(trial))
    return outcome


def two_at_once(job: Job, trial: Path, draw: random.Random) -> str:
    first = Victim(job.name, job.world, trial)
    time.sleep(draw.uniform(0, 0.5 * job.seconds))
    second = Victim(job.name, job.world, trial)
    return " / ".join(sorted(first.end().outcome.partition(":")[0] for first in (first, second)))


def two_of_which_one_is_killed(job: Job, trial: Path, draw: random.Random) -> str:
    first, second = (Victim(job.name, job.world, trial) for _ in range(2))
    first.end(kill_after=draw.uniform(0, job.seconds))
    return f"{KILLED} / {second.end().outcome.partition(':')[0]}"


FAULTS: tuple[Callable[[Job, Path, random.Random], str], ...] = (
    killed_at_a_call,
    killed_at_a_moment,
    killed_twice,
    killed_when_all_is_there,
    full_disk,
    two_at_once,
    two_of_which_one_is_killed,
)


def tried(job: Job, fault: Callable[[Job, Path, random.Random], str], trials: int, seed: int) -> dict[str, object]:
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
            kept, taken = timings(trial)
            lost.append(taken - kept)
            again = run(job.name, job.world, trial).outcome
            assert again == "done", f"{job.name}, {fault.__name__}, trial {number}: {outcome}, and then {again}"
            assert result(job.name, trial) == job.result, f"{job.name}, {fault.__name__}, trial {number}"
    found: dict[str, object] = {"trials": trials, "outcomes": dict(sorted(outcomes.items())), "same_result": trials}
    return found | ({"most_timings_lost": max(lost)} if job.name == "profile" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="of every fault with every job")
    parser.add_argument("--job", choices=JOBS, action="append", help="all by default; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tmpfs", action="store_true", help="full disks are tmpfs mounts too; needs root")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    faults = (*FAULTS, full_tmpfs) if asked.tmpfs else FAULTS
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder)
        make_world(world)
        for name in asked.job or JOBS:
            job = undisturbed(name, world, world / name)
            for fault in faults:
                found.setdefault(name, {})[fault.__name__] = harmed = tried(job, fault, asked.trials, asked.seed)
                print(f"{name:9} {fault.__name__:27} {harmed}", file=sys.stderr, flush=True)
                if asked.output:
                    asked.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
