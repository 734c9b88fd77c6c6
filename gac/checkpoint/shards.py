"""The index of a checkpoint whose weights are in several files."""

import json
from pathlib import Path

from gac.errors import CheckpointError
from gac.models.loading import UNREADABLE


def shard_names(directory: Path, index: str, suffix: str = ".safetensors") -> tuple[str, ...]:
    """The files that an index names, each once, in order; all of this directory, and all there.

    Args:
        index: name of the index.
        suffix: of the files.

    Raises:
        CheckpointError: the file is no index, names files elsewhere or of another kind, or one of them is missing.
    """
    try:
        names = set(json.loads((directory / index).read_bytes())["weight_map"].values())
    except UNREADABLE as failure:
        raise _wrong(directory, f"{index} is no index", "a weight_map from weights to files") from failure
    ordered = tuple(sorted(map(str, names)))
    for name in ordered:
        if Path(name).name != name or not name.endswith(suffix):
            raise _wrong(
                directory, f"{index} names the file {name!r}", f"a {suffix.removeprefix('.')} file of this directory"
            )
        check_there(directory, name)
    if not ordered:
        raise _wrong(directory, f"{index} names no file", "a weight_map from weights to files")
    return ordered


def check_there(directory: Path, name: str) -> None:
    """Refuse a checkpoint that lacks a file.

    Raises:
        CheckpointError: it is missing.
    """
    if not (directory / name).is_file():
        raise _wrong(directory, f"{name} is missing", "every file that was saved")


def _wrong(directory: Path, given: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{directory}: {given}", expected, "Save or copy the model again.")
