"""The run of this process: started at the first call that needs it, and open until the process ends."""

import atexit
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist
import transformers

from gac.core.distributed import launch
from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.distributed.watch import Watch
from gac.core.errors import GacError, first_line
from gac.core.progress import no_progress
from gac.core.version import __version__

WAIT_TIMEOUT = timedelta(days=1)  # longest wait for another process that works: for rank 0 where it measures alone
CALL_TIMEOUT = timedelta(minutes=10)  # longest wait of the first process to call a function for all others to call it


def this_run() -> Ranks:
    """Return the processes of this run; a single one outside of torchrun."""
    return ALONE if launch.processes() == 1 else _started()[0]


@contextmanager
def on_every_rank(name: str) -> Iterator[None]:
    """Run the body of a function of this name, which all of several processes call at once; rank 0 alone prints.

    A GacError is raised on rank 0, also where packages or GPUs of the processes differ, or not all of them call it;
    the others exit with it.
    """
    ranks, watch = _started()
    with nullcontext() if ranks.leads else _quiet(), _watched(watch, ranks):
        _meet(name, ranks)
        yield


def check_shared(directory: Path, ranks: Ranks) -> None:
    """Raise GacError if the processes do not share a directory, naming the first that does not see rank 0's files."""
    if ranks.count == 1:
        return
    with ExitStack() as files:
        name = ranks.once(lambda: files.enter_context(NamedTemporaryFile(dir=directory, prefix=".shared-")).name)
        seen = ranks.gathered((directory / Path(name).name).exists())
        ranks.wait()
    if not all(seen):
        raise GacError(
            f"{directory}, which rank {seen.index(False)} of {ranks.count} does not share with rank 0",
            "a directory that all processes share: each reads the measurements of the others",
            "Set GAC_HOME to a directory on a file system that all nodes mount.",
        )


@cache
def _started() -> tuple[Ranks, Watch]:
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        rank, gpus = launch.local_rank(), torch.cuda.device_count()
        if rank >= gpus:
            remedy = f"Start at most {gpus} processes a node (torchrun --nproc-per-node)."
            raise GacError(f"process {rank} of a node with {gpus} GPUs", "a GPU for every process", remedy)
        torch.cuda.set_device(rank)
    try:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=CALL_TIMEOUT)
        groups = {"cpu": dist.new_group(backend="gloo", timeout=WAIT_TIMEOUT)}
        if on_gpus:
            groups["cuda"] = dist.new_group(backend="nccl", timeout=WAIT_TIMEOUT)
        watched = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        store = dist.distributed_c10d._get_default_store()
    except (ValueError, RuntimeError) as failure:
        raise GacError(
            f"{launch.processes()} processes that do not find one another: {first_line(failure)}",
            "the environment that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
            "Start them with torchrun; for one process, unset RANK and WORLD_SIZE.",
        ) from failure
    count = dist.get_world_size()
    names: list[Any] = [None] * count
    name = f"rank {dist.get_rank()} of {count} (process {os.getpid()} on {platform.node()})"
    dist.all_gather_object(names, name, group=groups["cpu"])
    watch = Watch(watched, names, store)
    atexit.register(watch.close)
    return Ranks(groups, watch.settle), watch


def _meet(name: str, ranks: Ranks) -> None:
    """Wait for all processes to call the function, and compare their packages and GPUs."""
    try:
        ranks.meet(CALL_TIMEOUT)
    except RuntimeError as failure:
        raise GacError(
            f"gac.{name} on rank {ranks.rank}, where others do not call it: {first_line(failure)}",
            f"the same call in all {ranks.count} processes",
            "Call it in every process; to have one process work alone, unset RANK and WORLD_SIZE.",
        ) from failure
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "gac": __version__}
    named = {f"{package} version": version for package, version in versions.items()}
    ranks.check_alike({"function": f"gac.{name}", **named, "GPU": gpu})


@contextmanager
def _watched(watch: Watch, ranks: Ranks) -> Iterator[None]:
    watch.begin()
    try:
        yield
    except BaseException as failure:
        watch.fail(failure)
        raise
    watch.end()
    ranks.wait()


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("gac")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with no_progress():
            yield
    finally:
        logger.setLevel(level)
