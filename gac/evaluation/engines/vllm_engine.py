"""vLLM with one model, in a process of its own: ``python -m gac.evaluation.engines.vllm_engine CALLS ANSWERS``.

It uses ``LLM`` and ``SamplingParams`` alone, and reads sizes where the engine tells them: vLLM 0.26 and 0.32 run it.
"""

import os
import platform
import sys
import time
from collections.abc import Sequence
from random import Random
from statistics import median
from typing import Any

from gac.core.version import __version__
from gac.evaluation.engines.process import serve
from gac.evaluation.engines.workloads import DECODE_STEPS, EngineWorkload

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs here, where its CUDA graphs can be timed
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB; on a GPU the share of its memory counts
}
_TIMED = range(2, 8, 2)  # decode steps by their number; a step is one graph once all sequences are past their prompts
_REPEATS = 8


class VllmEngine:
    """Opens one model, and times runs of it."""

    def open(
        self, model: str, max_length: int, sequences: int, share: float, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Open a model; returns versions, device and size of its KV cache.

        Args:
            max_length: tokens of the longest sequence.
            sequences: that run at once.
            share: of the GPU's memory.
            options: further arguments of ``LLM``.
        """
        import torch
        import vllm

        self._llm = vllm.LLM(
            model=model,
            skip_tokenizer_init=True,
            max_model_len=max_length,
            max_num_seqs=sequences,
            gpu_memory_utilization=share,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **options,
        )
        config = self._llm.llm_engine.vllm_config
        self._vocabulary = int(config.model_config.get_vocab_size())
        self._graphs = _GraphTimer() if torch.cuda.is_available() else None
        versions = {"vllm": vllm.__version__, "torch": torch.__version__, "gac": __version__}
        return {
            "versions": versions | ({"cuda": torch.version.cuda} if torch.version.cuda else {}),
            "device": torch.cuda.get_device_name() if self._graphs else f"CPU ({platform.machine()})",
            "kv_cache_tokens": getattr(config.cache_config, "kv_cache_size_tokens", None),
        }

    def measure(self, workload: str, graph_alone: bool = False) -> dict[str, float | None]:
        """Time one run: ms of wall time, and of the CUDA graph where a decode step is one.

        Prefill: until all sequences have their first token. Decode: one step, by the difference of a run of 65 tokens
        and one of 1 token. Throughput: until the last request is answered.

        Args:
            graph_alone: leave out the wall time of a decode step that is a CUDA graph.
        """
        run = EngineWorkload.parse(workload)
        draw, size = Random(1), self._vocabulary
        # Tokens with a meaning of their own stand at either end of a vocabulary.
        prompts = [[draw.randrange(size // 4, size // 2) for _ in range(prompt)] for prompt, _ in run.lengths]
        answers = [answer for _, answer in run.lengths]
        if run.phase != "decode":
            return {"ms": self._ms(prompts, answers), "graph_ms": None}
        graph_ms = None
        if self._graphs is not None:
            with self._graphs:
                self._ms(prompts, answers)
            graph_ms = self._graphs.step_ms()
        if graph_alone and graph_ms is not None:
            return {"ms": None, "graph_ms": graph_ms}
        first = self._ms(prompts, [1] * len(answers))
        return {"ms": (self._ms(prompts, answers) - first) / DECODE_STEPS, "graph_ms": graph_ms}

    def _ms(self, prompts: Sequence[Sequence[int]], answers: Sequence[int]) -> float:
        from vllm import SamplingParams

        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        sampling = [
            SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, detokenize=False) for answer in answers
        ]
        start = time.perf_counter()
        self._llm.generate(inputs, sampling, use_tqdm=False)
        return 1e3 * (time.perf_counter() - start)


class _GraphTimer:
    """A context in which some replays of a CUDA graph are repeated between two events.

    Repeated, they follow each other without a gap, so that the time is the GPU's alone. A step that is run again
    writes the same numbers to the same places.
    """

    def __init__(self) -> None:
        import torch

        self._graphs: list[Any] | None = None
        self._timings: list[tuple[Any, Any]] = []
        graphs: Any = torch.cuda.CUDAGraph
        replay: Any = graphs.replay
        event: Any = torch.cuda.Event

        def timed(graph: Any) -> None:
            if self._graphs is not None:
                if len(self._graphs) in _TIMED:
                    start, end = event(enable_timing=True), event(enable_timing=True)
                    start.record()
                    for _ in range(_REPEATS):
                        replay(graph)
                    end.record()
                    self._timings.append((start, end))
                self._graphs.append(graph)
            replay(graph)

        graphs.replay = timed

    def __enter__(self) -> None:
        self._graphs, self._timings = [], []

    def __exit__(self, *_: object) -> None:
        import torch

        torch.cuda.synchronize()
        timed = [*map(id, self._graphs or [])][: _TIMED.stop]  # at the end, sequences run out one by one
        self._same, self._graphs = len({*timed}) == 1, None

    def step_ms(self) -> float | None:
        """Return the median time of a step; None where a step is no graph, or is cut into several."""
        if not self._same or not self._timings:
            return None
        return median(float(start.elapsed_time(end)) for start, end in self._timings) / _REPEATS


if __name__ == "__main__":
    for _name, _value in _ENVIRONMENT.items():
        os.environ.setdefault(_name, _value)
    serve(VllmEngine(), *map(int, sys.argv[1:3]))
