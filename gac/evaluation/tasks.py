"""Tasks of lm-evaluation-harness: its own by name, and local ones that need no network."""

import contextlib
import importlib.util
import io
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from logging.handlers import BufferingHandler
from numbers import Real
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gac.core.errors import ModelError, TaskError, did_you_mean, first_line
from gac.core.progress import has_bars
from gac.evaluation.perplexity import dtype_of
from gac.evaluation.results import TaskScore
from gac.evaluation.sample_tasks import SAMPLE_TASKS, task_names
from gac.models.modules import frozen

logger = logging.getLogger("gac")

_FILES = (".yaml", ".yml")
_SEED = 1234  # the harness's own seed of few-shot examples


@dataclass(frozen=True, eq=False)
class Suite:
    """Tasks with their data, for one model after the other."""

    requested: Mapping[str, Mapping[str, Any]]  # the harness's groups and tasks by name, for each requested one or file
    num_fewshot: int | None = None  # examples before every item; None takes each task's default
    limit: int | None = None  # items of each task, from the first on; None takes all

    def run(
        self, model: PreTrainedModel, tokenizer: Any, batch: int = 1, progress: bool = True
    ) -> tuple[TaskScore, ...]:
        """Score a model, on its device and in its dtype, ``batch`` requests at a time.

        A TaskError says if data does not fit its task, a ModelError if a log-likelihood or score is not finite.
        """
        from lm_eval import evaluate

        from gac.evaluation.harness import GacLM

        tasks, groups = self._merged("tasks"), self._merged("groups")
        for task in tasks.values():  # as the harness's own command does, with the same examples for every model
            default = task.get_config("num_fewshot")
            if default is None or (self.num_fewshot is not None and default != 0):
                task.set_config(key="num_fewshot", value=self.num_fewshot or 0)
            task.set_fewshot_seed(seed=_SEED)
        with _quiet(progress), frozen(model), _task_errors(f"tasks {', '.join(self.requested)} cannot be run"):
            runner = GacLM(model, deepcopy(tokenizer), batch_size=batch)  # which may set a padding token
            results = evaluate(runner, {"tasks": tasks, "groups": groups}, limit=self.limit, log_samples=False)
        return tuple(self._scores(results, dtype_of(model)))

    def _merged(self, kind: str) -> dict[str, Any]:
        return {name: item for request in self.requested.values() for name, item in request.get(kind, {}).items()}

    def _scores(self, results: Any, dtype: str) -> Iterator[TaskScore]:
        for request in self.requested.values():
            group = [name for name in request.get("groups", {}) if _metrics(results["results"].get(name, {}))][:1]
            for name in group or request["tasks"]:
                counts = [results["n-samples"][task] for task in (request["tasks"] if group else [name])]
                for metric, value, stderr in _metrics(results["results"][name]):
                    if not math.isfinite(value):
                        problem = f"{metric} of {name} is {value}"
                        raise ModelError(problem, "a finite score", "Check the weights and the task.")
                    yield TaskScore(
                        name,
                        metric,
                        value,
                        stderr,
                        items=sum(count["effective"] for count in counts),
                        total=sum(count["original"] for count in counts),
                        num_fewshot=results["n-shot"].get(name),
                        version=str(results["versions"].get(name, "")),
                        harness=f"lm-eval {version('lm_eval')}",
                        dtype=dtype,
                    )


def open_suite(tasks: Sequence[str], num_fewshot: int | None = None, limit: int | None = None) -> Suite:
    """Find tasks, tags or groups of the harness (``hellaswag``), packaged tasks, or files of tasks, with their data.

    A TaskError says if the harness is not installed, or a task is unknown or malformed, or lacks its data.
    """
    tasks = task_names(tasks)
    for package in ("lm_eval", "accelerate"):
        if importlib.util.find_spec(package) is None:
            problem = f"tasks need {package}, which is not installed"
            raise TaskError(problem, "the extra evaluation", "In GAC's checkout, run pip install '.[evaluation]'.")
    from lm_eval.tasks import TaskManager

    named = [task for task in tasks if not task.endswith(_FILES) and task not in SAMPLE_TASKS]
    manager = TaskManager(include_defaults=bool(named))  # reading thousands of its YAML files takes seconds
    for task in named:
        if task not in manager.task_index:
            remedy = did_you_mean(task, [*SAMPLE_TASKS, *manager.all_tasks], "Run lm-eval ls tasks for the list.")
            expected = "a task, tag or group of lm-eval, or the path of a YAML file"
            raise TaskError(f"task {task!r} is unknown", expected, remedy)
    requested: dict[str, Mapping[str, Any]] = {}
    for task in tasks:
        with _quiet(True), _task_errors(f"task {task} cannot be loaded"):
            loaded = manager.load([_entry(task)])
        for earlier, others in requested.items():
            for twice in loaded["tasks"].keys() & others["tasks"].keys():
                raise TaskError(f"the task {twice} in {earlier} and {task}", "every task once", "Leave one out.")
        requested[task] = loaded
    return Suite(requested, num_fewshot, limit)


def _entry(task: str) -> str | dict[str, Any]:
    """The task as the harness's manager takes it: a name it knows, or a configuration."""
    if task in SAMPLE_TASKS:
        return SAMPLE_TASKS[task]()
    return read_task_file(Path(task)) if task.endswith(_FILES) else task


def read_task_file(path: Path) -> dict[str, Any]:
    """Read a task of the harness, without ``!function`` and ``include``, which would run code; else a TaskError.

    Paths under ``data_files`` are relative to the file.
    """
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as failure:
        raise _malformed(f"{path} cannot be read: {first_line(failure)}") from failure
    if not isinstance(config, dict) or not isinstance(config.get("task"), str):
        raise _malformed(f"{path} has no key task with the task's name")
    if "include" in config:
        raise _malformed(f"{path} includes another file")
    options = config.get("dataset_kwargs")
    if isinstance(options, dict) and "data_files" in options:
        options["data_files"] = _absolute(options["data_files"], path.absolute().parent)
    return config


def _absolute(files: Any, folder: Path) -> Any:
    if isinstance(files, dict):
        return {split: _absolute(part, folder) for split, part in files.items()}
    if isinstance(files, list):
        return [_absolute(part, folder) for part in files]
    return str(folder / files) if isinstance(files, str) and "://" not in files else files


def _malformed(problem: str) -> TaskError:
    return TaskError(
        problem,
        "a task of lm-eval as one YAML file without code",
        "See docs/evaluate.md for one, or use python -m gac.evaluation.harness, which runs all that lm-eval does.",
    )


@contextlib.contextmanager
def _task_errors(problem: str) -> Iterator[None]:
    """Turn the errors of the harness and its data sets into a TaskError."""
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateError

    kinds = (OSError, ImportError, ValueError, LookupError, TypeError, AttributeError, TemplateError, DatasetsError)
    try:
        yield
    except kinds as failure:
        raise TaskError(
            f"{problem}: {type(failure).__name__}: {first_line(failure)}",
            "a task whose data can be read and has the columns that it names",
            "Check the task and the network; a task file with local data needs none.",
        ) from failure


@contextlib.contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Log the harness's warnings as GAC's, and show its progress bars, which have no switch, on a terminal only.

    What it prints goes there too: standard output is for GAC's answer.
    """
    harness, records = logging.getLogger("lm_eval"), BufferingHandler(sys.maxsize)
    before = harness.level, harness.propagate
    harness.addHandler(records)
    harness.setLevel(logging.WARNING)
    harness.propagate = False
    try:
        shown = progress and has_bars()
        with (
            contextlib.nullcontext() if shown else contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(sys.stderr),
        ):
            yield
    finally:
        harness.removeHandler(records)
        harness.setLevel(before[0])
        harness.propagate = before[1]
        for message in dict.fromkeys(record.getMessage() for record in records.buffer):
            logger.warning("lm-eval: %s", message)


def _metrics(results: Mapping[str, Any]) -> list[tuple[str, float, float | None]]:
    """Name, value and standard error of every metric; the harness calls them ``acc,none``: metric, filter."""
    metrics = []
    for key, value in results.items():
        metric, _, by = key.partition(",")
        if by and isinstance(value, Real) and not metric.endswith("_stderr"):
            error = results.get(f"{metric}_stderr,{by}")  # may be N/A or NaN
            stderr = float(error) if isinstance(error, Real) and math.isfinite(error) else None
            metrics.append((metric if by == "none" else key, float(value), stderr))
    return metrics
