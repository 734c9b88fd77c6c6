"""Measure models in vLLM, in turns where all of them fit in memory, else one after the other."""

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from gac.core.arguments import Count, checked
from gac.core.errors import CheckpointError, GacError, ModelError
from gac.core.progress import progress_bar, rough_duration
from gac.core.untrusted import file_digest
from gac.core.words import number_of
from gac.evaluation.engines.process import EngineError, Worker, worker_command
from gac.evaluation.engines.records import SCHEMA, EngineBench, EngineModel, EngineTiming
from gac.evaluation.engines.workloads import EngineWorkload, default_workloads
from gac.models.loading import load_config
from gac.models.packaged import PACKAGED
from gac.models.shapes import SHAPES
from gac.runtime.contract import DIGESTS
from gac.runtime.vllm.check import refusal

logger = logging.getLogger("gac")

TURNS, TOKENS, MOST_MODELS = 5, 1024, 6
_MEMORY = 0.9
"""Of a GPU, for all models that are open at once."""

_RESERVED = frozenset(
    {
        *("model", "skip_tokenizer_init", "max_model_len", "max_num_seqs", "gpu_memory_utilization"),
        *("enable_prefix_caching", "disable_log_stats"),
    }
)
"""Arguments of the engine that are chosen here."""

_WORD = re.compile(r"[A-Za-z][\w./:-]*")


@checked
def bench_engine(
    models: Sequence[str],
    *,
    workloads: Sequence[str] = (),
    turns: Count = TURNS,
    options: Sequence[str] = (),
    python: str | Path | None = None,
) -> EngineBench:
    """Time models in vLLM: each in a process of its own, all in turns if they fit in the GPU's memory together.

    Args:
        models: directories (compressed or dense) or hub ids, 1 to 6; speeds are relative to the first.
        workloads: ``prefill:BxS``, ``decode:B@C`` or ``throughput:RxS``; by default ``default_workloads(1024)``.
        turns: measured runs of each workload, after one that is not.
        options: further arguments of ``vllm.LLM`` for all models, as NAME=VALUE: JSON, or a word (``dtype=float32``).
        python: of an environment with vLLM and GAC; None: the one that runs this.

    Raises:
        GacError: a model, workload or option cannot be used; or a process of the engine fails, with its last lines.
    """
    runs, arguments = tuple(map(EngineWorkload.parse, workloads)) or default_workloads(TOKENS), parsed_options(options)
    if len({*runs}) < len(runs):
        raise GacError(f"the workloads {', '.join(map(str, runs))}", "each once", "Name each once.")
    _check_models(models, runs)
    session = _Session(runs, turns, arguments, worker_command(python))
    tokens = (turns + 1) * sum(run.processed_tokens for run in runs)
    runs_each = f"{number_of(len(runs), 'workload')}, {number_of(turns, 'turn')} and a warm-up"
    logger.info("%s in vLLM: %s; %s tokens each", number_of(len(models), "model"), runs_each, f"{tokens:,}")
    share, in_turns = _MEMORY / len(models), True
    try:
        measured = session.measure(models, share)
    except EngineError as failure:
        if not failure.lacks_memory or len(models) == 1:
            raise
        logger.info("%s\nthe models do not fit together: one is measured after the other", failure.given)
        share, in_turns = _MEMORY, False
        measured = [each for name in models for each in session.measure([name], share)]
    opened = measured[0].opened
    return EngineBench(
        SCHEMA,
        "vllm",
        opened["versions"],
        opened["device"],
        in_turns,
        None if opened["device"].startswith("CPU") else share,
        turns,
        _summarised(measured, runs),
        tuple(options),
    )


def parsed_options(options: Sequence[str]) -> dict[str, Any]:
    """Read arguments of the engine; a GacError names those that are malformed, or that GAC chooses."""
    arguments: dict[str, Any] = {}
    for option in options:
        name, _, text = option.partition("=")
        if not name.isidentifier() or not text:
            expected = "NAME=VALUE, as in dtype=float32"
            raise GacError(f"engine option {option!r}", expected, "Names are those of the arguments of vllm.LLM.")
        if name in _RESERVED or name in arguments:
            problem = f"engine option {option!r}, whose name {'is there twice' if name in arguments else 'GAC sets'}"
            raise GacError(problem, "each other argument of vllm.LLM at most once", "Leave it out.")
        try:
            arguments[name] = json.loads(text)
        except ValueError as failure:
            if not _WORD.fullmatch(text):
                raise GacError(f"engine option {option!r}: {failure}", "a word, or JSON", "Correct it.") from failure
            arguments[name] = text
    return arguments


def _check_models(models: Sequence[str], runs: Sequence[EngineWorkload]) -> None:
    if not 1 <= len(models) <= MOST_MODELS:
        raise GacError(f"{len(models)} models", f"1 to {MOST_MODELS}", "Time fewer at once.")
    if len({*models}) < len(models):
        remedy = "Time a copy of the directory, to time it twice."
        raise GacError(f"the models {', '.join(models)}", "each once", remedy)
    for name in models:
        _check(name, runs)


def _check(name: str, runs: Sequence[EngineWorkload]) -> None:
    """Refuse a model that vLLM cannot open or run, or that has fewer positions than a workload needs."""
    if name in PACKAGED or name in SHAPES:
        problem = f"model {name!r}, which vLLM cannot open"
        remedy = "Name a directory; gac export DIR --merge -o DENSE writes one of the dense shapes."
        raise ModelError(problem, "a directory in transformers' format, or a hub id", remedy)
    config = load_config(name).get_text_config()
    if hasattr(config, "gac") and (unserved := refusal(config)):
        raise CheckpointError(f"{name}: {unserved[0]}", *unserved[1:])
    positions = getattr(config, "max_position_embeddings", None)
    longest = max(runs, key=lambda run: run.longest)
    if positions is not None and longest.longest > positions:
        raise ModelError(
            f"model {name!r} of {positions:,} positions, for {longest} with sequences of {longest.longest:,} tokens",
            f"workloads of at most {positions:,} tokens, answers included",
            "Name shorter ones with --workload, or shorten all with --tokens.",
        )


@dataclass(frozen=True)
class _Measured:
    name: str
    opened: Mapping[str, Any]  # what its process says of the engine and the device
    samples: Mapping[EngineWorkload, Sequence[Mapping[str, Any]]]  # a turn each


@dataclass(frozen=True)
class _Session:
    runs: Sequence[EngineWorkload]
    turns: int
    options: Mapping[str, Any]
    command: Sequence[str]

    def measure(self, models: Sequence[str], share: float) -> list[_Measured]:
        """Open models, each with a share of the memory, and measure every workload in turns: A B A B."""
        with ExitStack() as stack:
            workers = [stack.enter_context(Worker(name, self.command)) for name in models]
            # One after the other: while an engine finds out how much memory is free, nothing else may take any.
            opened = [self._open(worker, share) for worker in workers]
            total = len(models) * len(self.runs) * (self.turns + 1)
            bar = stack.enter_context(progress_bar(f"timing {' and '.join(models)}", "run", total))
            answers: dict[tuple[str, EngineWorkload], list[Mapping[str, Any]]] = {}
            begun = time.monotonic()
            for turn in range(self.turns + 1):
                for run, worker in product(self.runs, workers):
                    answer = _checked_answer(worker.name, run, worker.call("measure", workload=str(run)))
                    if turn:  # the one before the first warms up
                        answers.setdefault((worker.name, run), []).append(answer)
                    bar.update()
                if not turn:
                    logger.info(
                        "%s: %s", number_of(self.turns, "turn"), rough_duration((time.monotonic() - begun) * self.turns)
                    )
        return [
            _Measured(name, each, {run: answers[name, run] for run in self.runs})
            for name, each in zip(models, opened, strict=True)
        ]

    def _open(self, worker: Worker, share: float) -> Mapping[str, Any]:
        logger.info(
            "opening %s with %.0f%% of the memory; this takes minutes for a large model", worker.name, 100 * share
        )
        largest = max(self.runs, key=lambda run: run.cached_tokens)
        opened: Mapping[str, Any] = worker.call(
            "open",
            model=worker.name,
            max_length=max(run.longest for run in self.runs),
            sequences=max(run.sequences for run in self.runs),
            share=share,
            options=dict(self.options),
        )
        cached = opened["kv_cache_tokens"]
        if cached is not None and cached < largest.cached_tokens:
            raise worker.error(f"its KV cache holds {cached:,} tokens, and {largest} needs {largest.cached_tokens:,}")
        return opened


def _checked_answer(name: str, run: EngineWorkload, answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if answer["ms"] <= 0:
        problem = f"{name}: {run} took {answer['ms']:.3g} ms by the difference of two runs"
        raise GacError(problem, "a positive time", "Time it when nothing else runs, or with more sequences.")
    return answer


def _summarised(measured: Sequence[_Measured], runs: Sequence[EngineWorkload]) -> tuple[EngineModel, ...]:
    models: list[EngineModel] = []
    for each in measured:
        first = models[0].timings if models else [None] * len(runs)
        timings = tuple(EngineTiming.of(run, each.samples[run], dense) for run, dense in zip(runs, first, strict=True))
        digests = Path(each.name) / DIGESTS
        digest = file_digest(digests) if digests.is_file() else None
        models.append(EngineModel(each.name, digest, each.opened["kv_cache_tokens"], timings))
    return tuple(models)
