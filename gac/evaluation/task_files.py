"""Local tasks: one YAML file as lm-evaluation-harness reads it, and data beside it."""

from pathlib import Path
from typing import Any

from gac.errors import TaskError, first_line


def is_task_file(task: str) -> bool:
    """Whether a task is named by a path, and not by a name of the harness's own."""
    return task.endswith((".yaml", ".yml"))


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
