"""Whole steps of dense models in vLLM, as rows of a latency table: what an engine takes for all that is no GEMM too."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gac.core.errors import ModelError
from gac.core.progress import progress_bar
from gac.core.workloads import Workload
from gac.evaluation.engines.process import Worker, worker_command
from gac.forms import DENSE, Form
from gac.models.families import family_of
from gac.models.shapes import Shapes
from gac.models.sites import Site, Weight
from gac.plan.engines import PAIR, paired_rank, sites_in, steps_of, with_half_mlps
from gac.profiling.records import Measurement, Point
from gac.profiling.sweeps.journal import Journal
from gac.profiling.timing.device import fingerprint
from gac.runtime.contract import COMPRESSED, SCHEMA
from gac.schemes import Scheme, scheme_named

_AutoConfig: Any = transformers.AutoConfig
_MEMORY, _ANSWER = 0.75, 66
_TURNS = {"prefill": 7, "decode": 2}  # a prefill is wall time
_POSITIONS = 131_072
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
logger = logging.getLogger("gac")


def profile_steps(
    models: Mapping[str, Any],
    workloads: Sequence[Workload],
    path: Path,
    dtype: str = "bf16",
    python: str | Path | None = None,
    schemes: Sequence[str] = (),
) -> None:
    """Time dense models with random weights in vLLM, and add their steps to a latency table of this GPU.

    Each is timed by the engine's own class, and by GAC's plugin: as it is, with MLPs of half the width, with every
    planned weight as a low-rank pair, and with every one in each scheme. A decode step is the time of its CUDA
    graph, without compilation; a prefill is the time until all first tokens are there. Steps that the table has are not
    timed again. A GacError says if a config does not name its sizes as Llama's does, vLLM is not installed or cannot
    open a model, or the file is of another machine.

    Args:
        models: shapes or transformers configs of text models, by name.
        path: the table, or a new file.
        python: of an environment with vLLM and GAC; None: the one that runs this.
        schemes: by name.
    """
    stored = [scheme for scheme in map(scheme_named, schemes) if scheme.storage is not None]
    runs = [
        (name, values, points)
        for name, dense in models.items()
        for points, values in zip(_points(name, dense, workloads, dtype, stored), _configs(dense, stored), strict=True)
    ]
    with (
        Journal(path, fingerprint()) as journal,
        progress_bar("steps in vLLM", "step", sum(len(points) for *_, points in runs)) as bar,
    ):
        for name, values, points in runs:
            todo = {workload: point for workload, point in points.items() if journal.find(point) is None}
            bar.update(len(points) - len(todo))
            for point, times in _timed(name, values, todo, dtype, python) if todo else ():
                low, _, high = quantiles(times, n=4, method="inclusive")
                journal.add(Measurement.of(point, 1e6 * median(times), 1e6 * (high - low), len(times), None, True))
                bar.update()


def _points(
    name: str, config: Any, workloads: Sequence[Workload], dtype: str, schemes: Sequence[Scheme]
) -> list[dict[Workload, Point]]:
    """Return the points of a model's runs: of the operations of ``steps_of``, and of ``served_step`` in each scheme."""
    steps = [steps_of(config, workload) for workload in workloads]
    if () in steps:
        expected = "a config with hidden_size, intermediate_size and num_attention_heads, and layers that are alike"
        raise ModelError(f"steps of {name} in an engine", expected, "Leave --engine out for this model.")
    runs = [(dtype, operations) for operations in zip(*steps, strict=True)]
    runs += [(scheme.dtype, tuple(served for _, served, *_ in steps)) for scheme in schemes]
    return [
        {workload: Point(operation, dtype) for workload, operation in zip(workloads, operations, strict=True)}
        for dtype, operations in runs
    ]


def _configs(dense: Any, schemes: Sequence[Scheme]) -> Iterator[dict[str, Any]]:
    yield config_of(dense, served=False)
    yield config_of(dense, served=True)
    yield config_of(with_half_mlps(dense), served=True)
    yield config_of(dense, served=True, modules=paired_modules(dense))
    for scheme in schemes:
        yield config_of(dense, served=True, modules=stored_modules(dense, scheme))


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
            turns = 1 + _TURNS[workload.phase]
            answers = [worker.call("measure", workload=str(workload), graph_alone=True) for _ in range(turns)][1:]
            yield point, [answer["graph_ms"] or answer["ms"] for answer in answers]


def paired_modules(config: Any) -> dict[str, Any]:
    """Return the modules of a compressed model in which every planned weight is a low-rank pair, by its name."""
    return _modules(family_of(config).sites(config), PAIR, paired_rank, {})


def stored_modules(config: Any, scheme: Scheme) -> dict[str, Any]:
    """Return the modules of a compressed model with every weight in a scheme that vLLM runs in it, by its name."""
    storage = scheme.storage
    assert storage is not None, f"{scheme.name} has no storage"
    stored = {"scheme": scheme.name, "storage": storage.storage, "options": dict(storage.options)}
    return _modules(sites_in(scheme, config), DENSE, DENSE.full, stored)


def _modules(
    sites: Iterable[Site], form: Form, dim_of: Callable[[Weight], int], stored: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    modules = {}
    for weight in (weight for site in sites for weight in site.weights):
        spec = form.module(weight, dim_of(weight))
        of_form = {"form": form.name, "dim": dim_of(weight), "module": spec.module, "sizes": dict(spec.sizes)}
        modules[weight.name] = of_form | stored
    return modules


def config_of(config: Any, served: bool, modules: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the dense model's config.json; served: that of a compressed model with these modules, else dense."""
    if isinstance(config, Shapes):
        sizes = asdict(config) | {"max_position_embeddings": _POSITIONS, "tie_word_embeddings": False}
        config = _AutoConfig.for_model(**sizes)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    values: dict[str, Any] = config.to_dict() | {"architectures": [architecture]}
    if served:
        values |= {"architectures": [f"Gac{architecture}"], "model_type": COMPRESSED + config.model_type}
        values["gac"] = {"schema_version": SCHEMA, "modules": dict(modules)}
    return values
