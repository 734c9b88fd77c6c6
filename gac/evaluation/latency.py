"""Time whole models beside each other: prefill and decode under CUDA graphs, replayed in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from gac.core.arrays import Floats
from gac.core.errors import GacError
from gac.core.workloads import Workload
from gac.evaluation.shapes import weight_bytes
from gac.evaluation.steps import Contexts, Step, decode_step, prefill_step, prepare
from gac.models.families import family_of
from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.sampling import BATCH, PATIENCE, Batch, half_width
from gac.profiling.timing.stopwatch import Stopwatch

PRECISION = 0.005
LEAST_ROUNDS = 7
MOST_ROUNDS = 31
MOST_NS = 4e9
_RECOMPILATIONS = 256
METHOD = (
    "one CUDA graph a model, replayed in turns between CUDA events, every round in another order, queued while a "
    "kernel holds the GPU back; 7 to 31 rounds (7 where they take 4 s), until 1.57 IQR / sqrt(n) <= 0.5 % for all; "
    "medians"
)

Held = TypeVar("Held")
_cuda: Any = torch.cuda


@dataclass(frozen=True)
class Spread:
    """Median and interquartile range in ns of this many samples."""

    median_ns: float
    iqr_ns: float
    samples: int

    @classmethod
    def of(cls, samples: Floats) -> "Spread":
        """Of samples in ns."""
        low, median, high = (float(value) for value in np.percentile(samples, (25, 50, 75)))
        return cls(median, high - low, len(samples))


class Timer(Protocol, Generic[Held]):
    """Times whole models: the GPU's, or a test's."""

    def hold(self, model: PreTrainedModel, workload: Workload, compiled: bool) -> tuple[Held, int]:
        """Make a run of the workload ready, and say the bytes that the model and one run of it take."""

    def round(self, held: Sequence[Held]) -> Batch:
        """Run each once, in this order; ns of each."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One model to time: its name, how to come by it, and whether its layers are compiled."""

    name: str
    build: Callable[[], PreTrainedModel]
    compiled: bool = False


@dataclass(frozen=True)
class Timed:
    """What one run of a workload takes.

    Attributes:
        latency: of the run.
        tokens_per_second: read (prefill) or written (decode), of all sequences together.
        memory_bytes: weights, KV cache and the most that a run allocates.
    """

    name: str
    workload: str
    latency: Spread
    tokens_per_second: float
    memory_bytes: int


def time_in_turns(entries: Sequence[Entry], workload: Workload, timer: "Timer[Any]") -> list[Timed]:
    """Time models in turns; all of them are in memory at once.

    Raises:
        GacError: more than ten, they do not fit, or the workload is longer than a model's positions.
    """
    if len(entries) > BATCH:
        raise GacError(f"{len(entries)} models at once", f"at most {BATCH}", "Time them in several runs.")
    held = [timer.hold(entry.build(), workload, entry.compiled) for entry in entries]
    samples = interleaved(lambda order: timer.round([held[at][0] for at in order]), len(held))
    return [
        Timed(entry.name, str(workload), spread, 1e9 * workload.rows / spread.median_ns, taken)
        for entry, spread, (_, taken) in zip(entries, map(Spread.of, samples.T), held, strict=True)
    ]


def interleaved(round_of: Callable[[Sequence[int]], Batch], count: int) -> Floats:
    """Samples in ns, shape ``(rounds, count)``: every version once a round, in an order drawn anew (seed 0).

    A GPU at its power limit is faster after a run that took little power, so none may always follow the same one.

    Rounds are taken until every median is known to within 0.5 %, at least 7 and at most 31 of them; only 7 where they
    take 4 seconds. A first round does not count. One that was queued too late, so that launch overhead is in it, is
    taken again, 16 times at most.

    Args:
        round_of: runs the versions in the order that it is told.
    """
    rows: list[Floats] = []
    spent, discarded = 0.0, 0
    dice = np.random.default_rng(0)
    round_of(range(count))
    while len(rows) < MOST_ROUNDS:
        order = dice.permutation(count).tolist()
        batch = round_of(order)
        if batch.late and discarded < PATIENCE:
            discarded += 1
            continue
        rows.append(np.array(batch.ns)[np.argsort(order)])
        spent += float(rows[-1].sum())
        known = (half_width(column) <= PRECISION * float(np.median(column)) for column in np.stack(rows).T)
        if len(rows) >= LEAST_ROUNDS and (spent >= MOST_NS or all(known)):
            break
    return np.stack(rows)


Captured = tuple[torch.cuda.CUDAGraph, Step]
"""A run as a graph, and what it reads and writes: a graph alone keeps none of its memory."""


class GraphTimer:
    """Times models on the current CUDA device.

    Raises:
        ProfileError: there is none.
    """

    def __init__(self) -> None:
        header = fingerprint()
        self.memory_bytes = header.memory_bytes
        self._watch = Stopwatch(header.l2_bytes, header.sm_clock_max_mhz)
        self._contexts = Contexts()

    def hold(self, model: PreTrainedModel, workload: Workload, compiled: bool) -> tuple[Captured, int]:
        """Capture one run; bytes of the weights, the cache, and the most that a run allocates beside them.

        Raises:
            GacError: it does not fit in the GPU's memory.
        """
        try:
            ids = prepare(model, workload)
            cached, step = 0, prefill_step(model, ids)
            if workload.phase == "decode":
                context = self._contexts.of(model, workload, ids)
                cached, step = context.nbytes, decode_step(model, context)
            if compiled:
                compile_layers(model)
                step()
            before = _cuda.memory_allocated()
            _cuda.reset_peak_memory_stats()
            step()
            taken = _cuda.max_memory_allocated() - before
            return (self._watch.graph_of(step), step), weight_bytes(model) + cached + taken
        except torch.OutOfMemoryError as failure:
            raise GacError(
                f"{workload} does not fit in the GPU's memory beside the models that are timed with it",
                "a smaller batch or context",
                "Make it smaller, or time fewer models at once.",
            ) from failure

    def round(self, held: Sequence[Captured]) -> Batch:
        """Replay each once."""
        return self._watch.round([graph for graph, _ in held])


def compile_layers(model: PreTrainedModel) -> None:
    """Let each decoder layer run through ``torch.compile`` with ``shape_padding``; layers alike share their code."""
    dynamo: Any = torch._dynamo
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _RECOMPILATIONS)
    for layer in model.get_submodule(family_of(model.config).layers).children():
        layer.compile(dynamic=False, options={"shape_padding": True})
