"""Time whole models together: prefill and decode under CUDA graphs, replayed in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gac.core.arrays import Floats
from gac.core.errors import GacError
from gac.core.workloads import Workload
from gac.measurement.text import check_positions
from gac.models.families import family_of
from gac.profiling.timing.device import fingerprint
from gac.profiling.timing.sampling import BATCH, PATIENCE, Batch, half_width
from gac.profiling.timing.stopwatch import Stopwatch
from gac.runtime.storage.modules import stored_modules

PRECISION = 0.005
MIN_ROUNDS, MAX_ROUNDS = 7, 31
MAX_NS = 4e9
READ = 1024  # tokens of a sequence that are read to fill a context
_RECOMPILATIONS = 256
_ATTENTION = "sdpa_whole"
METHOD = (
    "one CUDA graph a model, replayed in turns between CUDA events, every round in another order, queued while a "
    "kernel holds the GPU back; 7 to 31 rounds (7 where they take 4 s), until 1.57 IQR / sqrt(n) <= 0.5 % for all; "
    "medians"
)

Step = Callable[[], Tensor]
_cuda: Any = torch.cuda


@dataclass(frozen=True)
class Spread:
    """Median and interquartile range, ns, of a number of samples."""

    median_ns: float
    iqr_ns: float
    samples: int

    @classmethod
    def of(cls, samples: Floats) -> "Spread":
        low, median, high = (float(value) for value in np.percentile(samples, (25, 50, 75)))
        return cls(median, high - low, len(samples))


class Timer(Protocol):
    """Times whole models: on a GPU, or in a test."""

    def hold(self, model: PreTrainedModel, workload: Workload, compiled: bool) -> tuple[Any, int]:
        """Prepare a run of the workload; also returns the bytes of the model and one run."""

    def round(self, prepared: Sequence[Any]) -> Batch:
        """Run each once, in this order; ns of each."""


class Entry(NamedTuple):
    name: str
    build: Callable[[], PreTrainedModel]
    compiled: bool = False  # with torch.compile


@dataclass(frozen=True)
class Timed:
    """The latency of one run of a workload."""

    name: str
    workload: str
    latency: Spread
    tokens_per_second: float  # read (prefill) or written (decode), of all sequences
    memory_bytes: int  # weights, KV cache and the peak allocation of a run


def time_in_turns(entries: Sequence[Entry], workload: Workload, timer: Timer) -> list[Timed]:
    """Time models in turns, all of them in memory.

    A GacError says if there are more than ten, they do not fit, or the workload is longer than a model's positions.
    """
    if len(entries) > BATCH:
        raise GacError(f"{len(entries)} models at once", f"at most {BATCH}", "Time them in several runs.")
    prepared = [timer.hold(entry.build(), workload, entry.compiled) for entry in entries]
    samples = interleaved(lambda order: timer.round([prepared[entry][0] for entry in order]), len(prepared))
    return [
        Timed(entry.name, str(workload), spread, 1e9 * workload.rows / spread.median_ns, size)
        for entry, spread, (_, size) in zip(entries, map(Spread.of, samples.T), prepared, strict=True)
    ]


def interleaved(run_round: Callable[[Sequence[int]], Batch], count: int) -> Floats:
    """Samples in ns, ``(rounds, count)``: every version once a round, in random order (seed 0), as ``METHOD`` says.

    A GPU at its power limit is faster after a run that took little power, so the order varies. The first round is
    dropped. One that was queued too late, and includes launch overhead, is repeated, up to 16 times.
    """
    rows: list[Floats] = []
    spent, discarded = 0.0, 0
    generator = np.random.default_rng(0)
    run_round(range(count))
    while len(rows) < MAX_ROUNDS:
        order = generator.permutation(count).tolist()
        batch = run_round(order)
        if batch.late and discarded < PATIENCE:
            discarded += 1
            continue
        rows.append(np.array(batch.ns)[np.argsort(order)])
        spent += float(rows[-1].sum())
        precise = (half_width(column) <= PRECISION * float(np.median(column)) for column in np.stack(rows).T)
        if len(rows) >= MIN_ROUNDS and (spent >= MAX_NS or all(precise)):
            break
    return np.stack(rows)


Captured = tuple[torch.cuda.CUDAGraph, Step]  # a graph, and the step that owns its inputs and outputs


class GraphTimer:
    """Times models on the current CUDA device; a ProfileError if there is none."""

    def __init__(self) -> None:
        header = fingerprint()
        self.memory_bytes = header.memory_bytes
        self._stopwatch = Stopwatch(header.l2_bytes, header.sm_clock_max_mhz)
        self._contexts = Contexts()

    def hold(self, model: PreTrainedModel, workload: Workload, compiled: bool) -> tuple[Captured, int]:
        """Capture one run; also returns the bytes of weights, cache and peak allocation."""
        try:
            ids = prepare(model, workload)
            cached, step = 0, prefill_step(model, ids)
            if workload.phase == "decode":
                context = self._contexts.of(model, workload, ids)
                cached, step = context.nbytes, decode_step(model, context)
            if compiled:
                dynamo: Any = torch._dynamo
                dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _RECOMPILATIONS)
                for layer in model.get_submodule(family_of(model.config).layers).children():  # equal ones share code
                    layer.compile(dynamic=False, options={"shape_padding": True})
                step()
            before = _cuda.memory_allocated()
            _cuda.reset_peak_memory_stats()
            step()
            peak = _cuda.max_memory_allocated() - before
            return (self._stopwatch.graph_of(step), step), weight_bytes(model) + cached + peak
        except torch.OutOfMemoryError as failure:
            problem = f"{workload} does not fit in the GPU's memory with the models that are timed with it"
            remedy = "Make it smaller, or time fewer models at once."
            raise GacError(problem, "a smaller batch or context", remedy) from failure

    def round(self, prepared: Sequence[Captured]) -> Batch:
        return self._stopwatch.round([graph for graph, _ in prepared])


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters, each counted once, and of its stored matrices."""
    stored = [tensor for module in stored_modules(model).values() for tensor in module.counted.values()]
    return sum(values.nbytes for values in (*model.parameters(), *stored))


class Context:
    """A static cache that is full but for the last token, for all models with keys and values of the same shape.

    It repeats what the given model wrote for the first ``READ`` tokens, because a long prompt of many sequences would
    take more memory than a step. The contents do not affect the time. ``ids`` are int64 ``(batch, tokens)``.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.length = ids.shape[1] - 1
        self.token = ids[:, -1:].contiguous()
        self.position = torch.full((1, 1), self.length, device=ids.device)
        self.cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
        read = min(self.length, READ)
        _last_logits(model, self.cache, input_ids=ids[:, :read])
        layers: Any = self.cache.layers
        for states in (states for layer in layers if layer.is_initialized for states in (layer.keys, layer.values)):
            for start in range(read, states.shape[2], read):
                states[:, :, start : start + read] = states[:, :, : min(read, states.shape[2] - start)]
        # All layers' lengths in one tensor: a graph then resets them with one kernel.
        self.lengths = torch.full((len(layers),), self.length, device=ids.device)
        for layer, length in zip(layers, self.lengths.unbind(), strict=True):
            layer.cumulative_length = length

    @property
    def nbytes(self) -> int:
        layers: Any = self.cache.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.is_initialized)


class Contexts(dict[Any, Context]):
    """The contexts of one workload. Models with keys and values of the same shape share one, to save memory."""

    def of(self, model: Any, workload: Workload, ids: Tensor) -> Context:
        cache = DynamicCache(config=model.config)
        _last_logits(model, cache, input_ids=ids[:1, :1])
        layers: Any = cache.layers  # plans can shorten values, and skip layers
        shapes = ((*layer.keys.shape, *layer.values.shape) if layer.is_initialized else () for layer in layers)
        key = (workload, *shapes)
        if any(known[0] != workload for known in self):
            self.clear()
        if key not in self:
            self[key] = Context(model, ids)
        return self[key]


def prepare(model: PreTrainedModel, workload: Workload) -> Tensor:
    """Random token ids for the workload, int64 ``(batch, tokens)``; a GacError if the model cannot read as many.

    The model's attention then runs without a mask, in PyTorch's fused kernels with shared key-value heads.
    """
    check_positions(model, workload.tokens, f"sequences in {workload}")
    if workload.phase == "decode" and workload.tokens < 2:
        raise GacError(f"workload {workload}", "a context of 2 tokens or more", "Use decode:1@1024.")
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)  # a name without a mask function makes no mask
    model.set_attn_implementation(_ATTENTION)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    return torch.randint(0, vocabulary, (workload.batch, workload.tokens), generator=generator).to(model.device)


def prefill_step(model: Any, ids: Tensor) -> Step:
    """A step that reads all tokens into a new cache and returns the last logits; sliding windows are ignored."""
    return lambda: _last_logits(model, DynamicCache(config=model.config), input_ids=ids)


def decode_step(model: Any, context: Context) -> Step:
    """A step that reads the last token of each sequence after the context, as often as it is called."""

    def step() -> Tensor:
        context.lengths.fill_(context.length)
        return _last_logits(model, context.cache, input_ids=context.token, position_ids=context.position)

    return step


@torch.no_grad()
def _last_logits(model: Any, cache: Any, **inputs: Tensor) -> Tensor:
    logits: Tensor = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits
