"""Kill jobs, fill disks, and run jobs beside themselves many times; count what came back and what was lost.

    python -m tests.benchmarks.crashes --trials 200 --output crashes.json

The tests do a handful of each (``tests/stress/test_crashes.py``). As root, disks are tmpfs mounts of a random size;
else files may not grow beyond a random size.
"""

import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.harness import options, write
from tests.stress.harming import (
    KILLED,
    Job,
    Victim,
    full_disk,
    killed_at_a_call,
    killed_twice,
    make_world,
    run,
    tried,
    two_at_once,
    undisturbed,
)
from tests.stress.victims import JOBS, counted


def killed_at_a_moment(job: Job, trial: Path, draw: random.Random) -> str:
    return Victim(job.name, job.world, trial).end(kill_after=draw.uniform(0, job.seconds)).outcome


def killed_when_all_is_there(job: Job, trial: Path, draw: random.Random) -> str:
    """The second run keeps or replaces the files of the first."""
    run(job.name, job.world, trial)
    return killed_at_a_call(job, trial, draw)


def two_of_which_one_is_killed(job: Job, trial: Path, draw: random.Random) -> str:
    first, second = (Victim(job.name, job.world, trial) for _ in range(2))
    first.end(kill_after=draw.uniform(0, job.seconds))
    return f"{KILLED} / {second.end().outcome.partition(':')[0]}"


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


FAULTS = (
    killed_at_a_call,
    killed_at_a_moment,
    killed_twice,
    killed_when_all_is_there,
    full_disk,
    two_at_once,
    two_of_which_one_is_killed,
)


def main() -> None:
    parser = options(__doc__)
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
                write(asked.output, **found)


if __name__ == "__main__":
    main()
