"""Whole steps of dense models in vLLM, as rows of a latency table: what an engine takes for all that is no GEMM too."""

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import transformers

from gac.core.errors import ModelError
from gac.core.progress import progress_bar
from gac.core.workloads import Workload
from gac.evaluation.engines.process import Worker, worker_command
from gac.plan.engines import step_of
from gac.profiling.records import Measurement, Point
from gac.profiling.sweeps.journal import Journal
from gac.profiling.timing.device import fingerprint

_AutoConfig: Any = transformers.AutoConfig
_TURNS, _MEMORY, _ANSWER = 5, 0.85, 66
_POSITIONS = 131_072
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
logger = logging.getLogger("gac")


def profile_steps(
    models: Mapping[str, Any],
    workloads: Sequence[Workload],
    path: Path,
    dtype: str = "bf16",
    python: str | Path | None = None,
) -> int:
    """Time dense models with random weights in vLLM, and add their steps to a latency table of this GPU.

    A decode step is the time of its CUDA graph, without compilation; a prefill is the time until all first tokens are
    there. Steps that the table has are not timed again.

    Args:
        models: shapes or transformers configs of text models, by name.
        path: the table, or a new file.
        python: of an environment with vLLM and GAC; None: the one that runs this.

    Returns:
        The number of steps that were timed.

    Raises:
        ModelError: the config of a model does not name its sizes as Llama's does.
        GacError: vLLM is not installed, or cannot open a model; the file is of another machine.
    """
    points = {name: _points(name, config, workloads, dtype) for name, config in models.items()}
    timed = 0
    with Journal(path, fingerprint()) as journal, progress_bar("steps in vLLM", "step") as bar:
        for name, config in models.items():
            todo = {workload: point for workload, point in points[name].items() if journal.find(point) is None}
            for point, times in _timed(name, config, todo, dtype, python) if todo else ():
                low, _, high = quantiles(times, n=4, method="inclusive")
                journal.add(Measurement.of(point, 1e6 * median(times), 1e6 * (high - low), len(times), None, True))
                timed += 1
                bar.update()
    return timed


def _points(name: str, config: Any, workloads: Sequence[Workload], dtype: str) -> dict[Workload, Point]:
    steps = {workload: step_of(config, workload) for workload in workloads}
    if None in steps.values():
        expected = "a config with hidden_size, intermediate_size and num_attention_heads"
        raise ModelError(f"steps of {name} in an engine", expected, "Leave --engine out for this model.")
    return {workload: Point(step, dtype) for workload, step in steps.items() if step is not None}


def _timed(name: str, config: Any, todo: Mapping[Workload, Point], dtype: str, python: str | Path | None) -> Any:
    logger.info("opening %s in vLLM with random weights", name)
    batches = sorted({workload.batch for workload in todo if workload.phase == "decode"})
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": batches or [1]}
    options = {"load_format": "dummy", "dtype": _DTYPES[dtype], "compilation_config": graphs}
    with tempfile.TemporaryDirectory() as folder, Worker(name, worker_command(python)) as worker:
        _as_config(config).save_pretrained(folder)
        worker.call(
            "open",
            model=folder,
            max_length=max(workload.tokens for workload in todo) + _ANSWER,
            sequences=max(workload.batch for workload in todo),
            share=_MEMORY,
            options=options | {"max_num_batched_tokens": max(2048, *(workload.rows for workload in todo))},
        )
        for workload, point in todo.items():
            answers = [worker.call("measure", workload=str(workload)) for _ in range(_TURNS + 1)][1:]
            yield point, [answer["graph_ms"] or answer["ms"] for answer in answers]


def _as_config(config: Any) -> Any:
    if not is_dataclass(config):
        return config
    sizes = asdict(config)  # type: ignore[arg-type]
    made = _AutoConfig.for_model(**sizes, max_position_embeddings=_POSITIONS, tie_word_embeddings=False)
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    made.architectures = [names[made.model_type]]
    return made
