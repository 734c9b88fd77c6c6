"""Victims: jobs that write files, each run in a process of its own, in a world that was made beforehand."""

import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

import gac
from gac.core.errors import GacError
from gac.forms.low_rank import low_rank
from gac.measurement import calibration
from gac.profiling.records import Launch, Measurement, Point
from gac.profiling.sweeps import sweep
from gac.testing import models
from tests.headers import make_header

POINTS = [Point(low_rank(1, 64, rank, 64)) for rank in range(1, 31)]
WRITERS = (
    *(
        "gac/core/io.py",
        "gac/measurement/store.py",
        "gac_extensions/baselines/measurements.py",
        "gac/profiling/sweeps/journal.py",
    ),
    *("gac/checkpoint/save.py", "gac/checkpoint/target.py"),
    *("safetensors/torch.py", "/shutil.py", "/tempfile.py"),
)
"""The code that files go through; a process is killed at one of its calls."""


def make_world(world: Path) -> None:
    """A model of two layers with a tokenizer, text to calibrate it on, a latency table, and a plan."""
    models.tiny_model().save_pretrained(world / "model")
    models.tiny_tokenizer().save_pretrained(world / "model")
    (world / "text.txt").write_text("the rank of a weight is small where curvature falls off " * 40, encoding="utf-8")
    profile(world, world)
    allocate(world, world)


class CountingMeasurer:
    """100 ns a unit of rank; every timing leaves a byte in a file of its own before it is handed over."""

    def __init__(self, counted: Path) -> None:
        self._counted = os.open(counted, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        os.write(self._counted, b".")
        axes = point.operation.axes
        return Measurement("low_rank", axes, "bf16", "cold", 100.0 * axes["r"], 1.0, 10, 1980, True)

    def launches(self, points: Sequence[Point]) -> list[tuple[Launch, ...]]:
        name = {0: "gemm", 1: "gemm_odd"}
        return [(Launch(name[point.operation.axes["r"] % 2], (2, 1, 1), (128, 1, 1), 0),) for point in points]


def counted(trial: Path) -> Path:
    """File that counts the timings taken, next to the trial, whose disk may be full."""
    return trial.with_name(f"{trial.name}.counted")


def profile(_world: Path, trial: Path) -> None:
    sweep.SENTINEL_SECONDS = 1e9  # the last three alone
    measurer = CountingMeasurer(counted(trial))
    sweep.run_sweep(POINTS, trial / "gpu.jsonl", measurer, make_header(), passes=3, progress=False)


def allocate(world: Path, trial: Path) -> None:
    os.environ["GAC_HOME"] = str(trial / "home")
    calibration.SNAPSHOT_SECONDS = -1.0  # a boundary between any two layers
    options = {"calibration": f"{world / 'text.txt'}:4x32", "profile": world / "gpu.jsonl", "align": False}
    # The rule keeps files of its own beside the curves.
    plan = gac.allocate(world / "model", 0.6, rule="zero-sum", progress=False, **options)
    plan.save(trial / "plan.json")


def compress(world: Path, trial: Path) -> None:
    os.environ["GAC_HOME"] = str(trial / "home")
    plan = gac.Plan.load(world / "plan.json")
    model = gac.compress(world / "model", plan, progress=False)
    gac.save(model, trial / "small", overwrite=True)


JOBS: dict[str, Callable[[Path, Path], None]] = {"profile": profile, "allocate": allocate, "compress": compress}


@dataclass(frozen=True)
class Harm:
    """Harm to a process; none by default.

    Attributes:
        at_call: it is killed at this call of the code in ``WRITERS``; 0: never.
        largest_file: bytes after which a file takes no more, as on a full disk; None: any number.
        wild_clock: the wall clock jumps by years between two readings.
    """

    at_call: int = 0
    largest_file: int | None = None
    wild_clock: bool = False


def serve(job: str, world: Path, trial: Path, harm: Harm, said: Connection) -> None:
    """Run a job under a harm; says ``ready``, and then what came of it and how many calls were counted."""
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    tqdm.set_lock(threading.RLock())  # its own would be a semaphore that a killed process leaves behind
    calls = _count_calls(harm.at_call)
    if harm.largest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (harm.largest_file, harm.largest_file))
    if harm.wild_clock:
        draw = random.Random(0)
        time.time = lambda: draw.uniform(0, 4e9)  # type: ignore[assignment]
    said.send("ready")
    outcome = "done"
    try:
        JOBS[job](world, trial)
    except GacError as failure:
        outcome = f"{type(failure).__name__}: {failure}"
    sys.setprofile(None)
    said.send((outcome, calls[0]))


def _count_calls(last: int) -> list[int]:
    """Count the calls that ``WRITERS`` enter or make; at the last one the process ends as by ``kill -9``."""
    count = [0]

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.endswith(WRITERS):
            count[0] += 1
            if count[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(look)
    sys.setprofile(look)
    return count
