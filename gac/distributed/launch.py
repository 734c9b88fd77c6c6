"""Which process of a run this is, as torchrun says; imports no torch."""

import os


def processes() -> int:
    """How many processes the run has, on all nodes; 1 where nothing started several."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def rank() -> int:
    """The number of this process among all, from 0."""
    return int(os.environ["RANK"]) if processes() > 1 else 0


def local_rank() -> int:
    """The number of this process on its node, from 0, which is that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0")) if processes() > 1 else 0


def leads() -> bool:
    """Whether this is the process that speaks and writes: rank 0."""
    return rank() == 0
