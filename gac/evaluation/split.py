"""Models to time that are split over GPUs, and the time of the slowest process."""

import gc
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from gac.checkpoint.load import load
from gac.core.distributed import launch
from gac.core.errors import ModelError
from gac.evaluation.latency import Timer
from gac.models.loading import is_checkpoint, load_model
from gac.profiling.timing.sampling import Batch, slowest
from gac.runtime.parallel.ranks import Ranks, SplitError, started
from gac.runtime.parallel.splitting import split


class SlowestTimer:
    """Times models in every process; each round counts as the slowest process saw it, so that all take equally many."""

    def __init__(self, timer: Timer, ranks: Ranks) -> None:
        self.hold, self._timer, self._ranks = timer.hold, timer, ranks

    def round(self, prepared: Sequence[Any]) -> Batch:
        """Run each once, in this order, in all processes at once; ns of each."""
        rounds: list[Any] = [None] * self._ranks.size
        torch.distributed.all_gather_object(rounds, self._timer.round(prepared), group=self._ranks.group)
        return slowest(rounds)


def ranks_of_torchrun() -> Ranks | None:
    """The processes that torchrun started; None for a single process."""
    return started() if launch.processes() > 1 else None


def end_together(ranks: Ranks) -> None:
    """End the run of all processes, after graphs with collectives are freed, for which NCCL would wait."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    torch.distributed.barrier(group=ranks.group)
    torch.distributed.destroy_process_group()


def open_split(name: str, ranks: Ranks) -> PreTrainedModel:
    """Load this process's shard of a dense model or of a directory that GAC wrote."""
    if is_checkpoint(name):
        return load(name, tp_plan="auto")
    return divided(load_model(name, device="cpu").model, ranks)


def divided(model: PreTrainedModel, ranks: Ranks) -> PreTrainedModel:
    """The model, split in place; a ModelError if it cannot be."""
    try:
        split(model, ranks)
    except SplitError as failure:
        raise ModelError(failure.given, failure.expected, failure.remedy) from failure
    return model
