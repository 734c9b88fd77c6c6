"""Which files hold a checkpoint's weights."""

import json
from pathlib import Path

from gac.errors import CheckpointError
from gac.models.loading import UNREADABLE


def weight_files(directory: Path, whole: str = "model.safetensors") -> tuple[tuple[str, ...], str | None]:
    """The files that hold the weights, each once, in order, and the name of the index that names them.

    All lie in this directory, and all are there.

    Args:
        whole: what the file is called where there is but one; there is no index then.

    Raises:
        CheckpointError: the index is none, names files elsewhere or of another kind, or a file is missing.
    """
    index = f"{whole}.index.json"
    indexed, suffix = (directory / index).exists(), Path(whole).suffix
    named = _named_in(directory, index) if indexed else (whole,)
    for name in named:
        if Path(name).name != name or not name.endswith(suffix):
            raise _wrong(directory, f"{index} names the file {name!r}", f"a {suffix[1:]} file of this directory")
        if not (directory / name).is_file():
            raise _wrong(directory, f"{name} is missing", "every file that was saved")
    return named, index if indexed else None


def _named_in(directory: Path, index: str) -> tuple[str, ...]:
    try:
        names = set(json.loads((directory / index).read_bytes())["weight_map"].values())
    except UNREADABLE as failure:
        raise _wrong(directory, f"{index} is no index", "a weight_map from weights to files") from failure
    if not names:
        raise _wrong(directory, f"{index} names no file", "a weight_map from weights to files")
    return tuple(sorted(map(str, names)))


def _wrong(directory: Path, given: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{directory}: {given}", expected, "Save or copy the model again.")
