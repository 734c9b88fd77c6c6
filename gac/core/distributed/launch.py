"""The number of this process in a run of torchrun; imports no torch."""

import os

from gac.core.errors import GacError


def processes() -> int:
    """Return the number of processes of the run, on all nodes; 1 outside of torchrun."""
    return _number("WORLD_SIZE", "1") if "RANK" in os.environ else 1


def rank() -> int:
    return _number("RANK", "0") if processes() > 1 else 0


def local_rank() -> int:
    return _number("LOCAL_RANK", "0") if processes() > 1 else 0


def leads() -> bool:
    """Return True on rank 0, which prints and writes."""
    return rank() == 0


def _number(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise GacError(
            f"the environment variable {name}={text!r}",
            "a whole number, as torchrun sets it",
            "Start the processes with torchrun; for one process, unset RANK and WORLD_SIZE.",
        )
    return int(text)
