"""Whole steps of dense models in vLLM, as rows of a latency table: what an engine takes for all that is no GEMM too."""

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gac.core.errors import ModelError
from gac.core.progress import progress_bar
from gac.core.workloads import Workload
from gac.evaluation.engines.process import Worker, worker_command
from gac.models.shapes import Shapes
from gac.plan.engines import steps_of
from gac.profiling.records import Measurement, Point
from gac.profiling.sweeps.journal import Journal
from gac.profiling.timing.device import fingerprint
from gac.runtime.contract import COMPRESSED, SCHEMA

_AutoConfig: Any = transformers.AutoConfig
_TURNS, _MEMORY, _ANSWER = 2, 0.75, 66
_POSITIONS = 131_072
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
logger = logging.getLogger("gac")


def profile_steps(
    models: Mapping[str, Any],
    workloads: Sequence[Workload],
    path: Path,
    dtype: str = "bf16",
    python: str | Path | None = None,
) -> None:
    """Time dense models with random weights in vLLM, and add their steps to a latency table of this GPU.

    Each is timed by the engine's own class, and by GAC's plugin with nothing changed. A decode step is the time of its
    CUDA graph, without compilation; a prefill is the time until all first tokens are there. Steps that the table has
    are not timed again.

    Args:
        models: shapes or transformers configs of text models, by name.
        path: the table, or a new file.
        python: of an environment with vLLM and GAC; None: the one that runs this.

    Raises:
        ModelError: the config of a model does not name its sizes as Llama's does.
        GacError: vLLM is not installed, or cannot open a model; the file is of another machine.
    """
    runs = [
        (name, served, _points(name, config, workloads, dtype, served))
        for name, config in models.items()
        for served in (False, True)
    ]
    with (
        Journal(path, fingerprint()) as journal,
        progress_bar("steps in vLLM", "step", sum(len(points) for *_, points in runs)) as bar,
    ):
        for name, served, points in runs:
            todo = {workload: point for workload, point in points.items() if journal.find(point) is None}
            bar.update(len(points) - len(todo))
            for point, times in _timed(name, config_of(models[name], served), todo, dtype, python) if todo else ():
                low, _, high = quantiles(times, n=4, method="inclusive")
                journal.add(Measurement.of(point, 1e6 * median(times), 1e6 * (high - low), len(times), None, True))
                bar.update()


def _points(name: str, config: Any, workloads: Sequence[Workload], dtype: str, served: bool) -> dict[Workload, Point]:
    steps = {workload: steps_of(config, workload) for workload in workloads}
    if () in steps.values():
        expected = "a config with hidden_size, intermediate_size and num_attention_heads"
        raise ModelError(f"steps of {name} in an engine", expected, "Leave --engine out for this model.")
    return {workload: Point(operations[served], dtype) for workload, operations in steps.items()}


def _timed(
    name: str, config: Mapping[str, Any], todo: Mapping[Workload, Point], dtype: str, python: str | Path | None
) -> Iterator[tuple[Point, list[float]]]:
    logger.info("opening %s (%s) in vLLM with random weights", name, config["architectures"][0])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what timing GEMMs took
    batches = sorted({workload.batch for workload in todo if workload.phase == "decode"})
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": batches or [1]}
    options = {"load_format": "dummy", "dtype": _DTYPES[dtype], "compilation_config": graphs}
    with tempfile.TemporaryDirectory() as folder, Worker(name, worker_command(python)) as worker:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
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


def config_of(config: Any, served: bool) -> dict[str, Any]:
    """Return the dense model's config.json; served: that of a compressed model in which nothing is changed."""
    if isinstance(config, Shapes):
        sizes = asdict(config) | {"max_position_embeddings": _POSITIONS, "tie_word_embeddings": False}
        config = _AutoConfig.for_model(**sizes)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    values: dict[str, Any] = config.to_dict() | {"architectures": [architecture]}
    if served:
        values |= {"architectures": [f"Gac{architecture}"], "model_type": COMPRESSED + config.model_type}
        values["gac"] = {"schema_version": SCHEMA, "modules": {}}
    return values
