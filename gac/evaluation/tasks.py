"""Tasks of lm-evaluation-harness: its own by name, and local ones that need no network."""

import contextlib
import importlib.util
import io
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from gac.evaluation.protocol import dtype_of
from gac.evaluation.results import TaskScore
from gac.models.modules import frozen

logger = logging.getLogger("gac")

_FILES = (".yaml", ".yml")  # what tells a path from a name of the harness's own
_SEED = 1234  # the harness's own, for the draw of few-shot examples


@dataclass(frozen=True, eq=False)
class Suite:
    """Tasks with their data, to be run on one model after the other.

    Attributes:
        asked: for each task, tag, group or file that was asked for, the harness's groups and tasks by name.
        num_fewshot: examples before every item; None takes each task's own number.
        limit: items of each task, from the first on; None takes all.
    """

    asked: Mapping[str, Mapping[str, Any]]
    num_fewshot: int | None = None
    limit: int | None = None

    def run(
        self, model: PreTrainedModel, tokenizer: Any, batch: int = 1, progress: bool = True
    ) -> tuple[TaskScore, ...]:
        """Score a model, where it is and as it is.

        Args:
            batch: requests that run at once.

        Raises:
            TaskError: the data does not fit the task.
            ModelError: a log-likelihood or a score is NaN or infinite.
        """
        from lm_eval import evaluate

        from gac.evaluation.harness import GacLM

        tasks, groups = self._merged("tasks"), self._merged("groups")
        self._prepare(tasks.values())
        with _quiet(progress), frozen(model), _reading(f"tasks {', '.join(self.asked)} cannot be run"):
            # The harness gives a tokenizer without a padding token one.
            runner = GacLM(model, deepcopy(tokenizer), batch_size=batch)
            results = evaluate(runner, {"tasks": tasks, "groups": groups}, limit=self.limit, log_samples=False)
        return tuple(self._scores(results, dtype_of(model)))

    def _merged(self, kind: str) -> dict[str, Any]:
        return {name: found for one in self.asked.values() for name, found in one.get(kind, {}).items()}

    def _prepare(self, tasks: Iterable[Any]) -> None:
        """Set the number of examples as the harness's own command does, and draw the same ones for every model."""
        for task in tasks:
            own = task.get_config("num_fewshot")
            if own is None or (self.num_fewshot is not None and own != 0):
                task.set_config(key="num_fewshot", value=self.num_fewshot or 0)
            task.set_fewshot_seed(seed=_SEED)

    def _scores(self, results: Any, dtype: str) -> Iterator[TaskScore]:
        for one in self.asked.values():
            whole = [name for name in one.get("groups", {}) if _metrics(results["results"].get(name, {}))][:1]
            for name in whole or one["tasks"]:
                counts = [results["n-samples"][task] for task in (one["tasks"] if whole else [name])]
                for metric, value, stderr in _metrics(results["results"][name]):
                    if not math.isfinite(value):
                        given = f"{metric} of {name} is {value}"
                        raise ModelError(given, "a finite score", "Check the weights and the task.")
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
    """Find tasks and fetch their data.

    Args:
        tasks: names of the harness's tasks, tags or groups (``hellaswag``), or paths of task files
            (``read_task_file``).

    Raises:
        TaskError: the harness is not installed, there is no such task, it is malformed, or its data cannot be had.
    """
    _check_installed()
    from lm_eval.tasks import TaskManager

    named = [task for task in tasks if not task.endswith(_FILES)]
    manager = TaskManager(include_defaults=bool(named))  # reading thousands of its YAML files takes seconds
    for task in named:
        if task not in manager.task_index:
            raise TaskError(
                f"task {task!r} is unknown",
                "a task, tag or group of lm-eval, or the path of a YAML file",
                did_you_mean(task, manager.all_tasks, "Run lm-eval ls tasks for the list."),
            )
    asked: dict[str, Mapping[str, Any]] = {}
    for task in dict.fromkeys(tasks):
        with _quiet(True), _reading(f"task {task} cannot be loaded"):
            found = manager.load([read_task_file(Path(task)) if task.endswith(_FILES) else task])
        for earlier, others in asked.items():
            for again in found["tasks"].keys() & others["tasks"].keys():
                given = f"the task {again} a second time, {earlier} has it already"
                raise TaskError(given, "every task once", "Leave one out.")
        asked[task] = found
    return Suite(asked, num_fewshot, limit)


def read_task_file(path: Path) -> dict[str, Any]:
    """The harness's configuration of a task; relative paths under ``data_files`` are taken from where the file is.

    Nothing of it is run: ``!function`` is refused, and so is ``include``.

    Raises:
        TaskError: it cannot be read, is no YAML without code, or names no task.
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


def _malformed(given: str) -> TaskError:
    return TaskError(
        given,
        "a task of lm-eval as one YAML file without code",
        "See docs/evaluate.md for one, or use python -m gac.evaluation.harness, which runs all that lm-eval does.",
    )


def _check_installed() -> None:
    for package in ("lm_eval", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise TaskError(
                f"tasks need {package}, which is not installed",
                "the extra evaluation",
                "In GAC's checkout, run pip install '.[evaluation]'.",
            )


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn what the harness and its data sets raise for a task that cannot be used into one TaskError."""
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateError

    kinds = (OSError, ImportError, ValueError, LookupError, TypeError, AttributeError, TemplateError, DatasetsError)
    try:
        yield
    except kinds as failure:
        raise TaskError(
            f"{what}: {type(failure).__name__}: {first_line(failure)}",
            "a task whose data is at hand, or can be fetched, and has the columns that it names",
            "Check the task and the network; a task file with its data beside it needs none.",
        ) from failure


@contextlib.contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Take the harness's warnings for GAC's own, and show its progress bars on a terminal only; they know no switch."""
    theirs, heard = logging.getLogger("lm_eval"), BufferingHandler(sys.maxsize)
    before = theirs.level, theirs.propagate
    theirs.addHandler(heard)
    theirs.setLevel(logging.WARNING)
    theirs.propagate = False
    try:
        with contextlib.nullcontext() if progress and has_bars() else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        theirs.removeHandler(heard)
        theirs.setLevel(before[0])
        theirs.propagate = before[1]
        for message in dict.fromkeys(record.getMessage() for record in heard.buffer):
            logger.warning("lm-eval: %s", message)


def _metrics(found: Mapping[str, Any]) -> list[tuple[str, float, float | None]]:
    """Name, value and standard error of every metric; the harness calls them ``acc,none``: metric, filter."""
    metrics = []
    for key, value in found.items():
        metric, _, by = key.partition(",")
        if by and isinstance(value, Real) and not metric.endswith("_stderr"):
            error = found.get(f"{metric}_stderr,{by}")  # N/A where there is none, NaN for one item
            stderr = float(error) if isinstance(error, Real) and math.isfinite(error) else None
            metrics.append((metric if by == "none" else key, float(value), stderr))
    return metrics
