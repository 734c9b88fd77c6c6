"""Several processes of one run on this machine, as torchrun starts them, and what they do in the tests.

They are forked from one process that has imported GAC, which spares each of them that.
"""

import atexit
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gac.api  # noqa: F401  # for the processes that are forked
from gac.profiling.table import Profile
from gac.testing import models

LAYERS = 4
TABLE = Profile.load("nvidia-h100-80gb-hbm3")
"""Read before the processes are forked, which spares each of them that."""

WINDOWS = "7x64"
"""Of two processes the second has windows of both halves of the text."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Ended:
    """How the processes of a run ended, by rank."""

    codes: list[int | None]
    errors: list[str]
    outputs: list[str]


def together(count: int, work: Callable[..., None], home: Path, *given: Any, seconds: float = 120) -> Ended:
    """Run ``work(*given)`` in so many processes; those that take longer are ended.

    Args:
        home: what is ``GAC_HOME`` for them; what they say is beside it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = [[home.parent / f"{home.name}-{rank}.{stream}" for stream in ("err", "out")] for rank in range(count)]
    processes = [
        CONTEXT.Process(target=_run, args=(rank, count, port, home, said[rank], work, given)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
        process.kill()
        process.join()
    errors, outputs = ([paths[at].read_text() for paths in said] for at in range(2))
    return Ended([process.exitcode for process in processes], errors, outputs)


def _run(
    rank: int, count: int, port: int, home: Path, said: list[Path], work: Callable[..., None], given: tuple[Any, ...]
) -> None:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    if count > 1:
        os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GAC_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    for path, stream in zip(said, (sys.stderr, sys.stdout), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    torch.set_num_threads(1)
    try:
        work(*given)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        sys.excepthook(*sys.exc_info())
        _exit(1)
    _exit(0)


def _exit(status: int) -> None:
    """As an interpreter ends, which a forked process does not by itself."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def llama() -> LlamaForCausalLM:
    """A random Llama of ``LAYERS`` layers, the same in every process."""
    config = LlamaConfig(**models.tiny_config().to_dict() | {"num_hidden_layers": LAYERS})
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def options(text: Path) -> dict[str, Any]:
    return {
        "tokenizer": models.tiny_tokenizer(),
        "calibration": f"{text}:{WINDOWS}",
        "profile": TABLE,
        "workloads": (),
        "progress": False,
    }
