"""Read files that may come from anyone: of bounded size, from their own directory alone, as strict JSON."""

import errno
import hashlib
import json
import os
import re
import stat
from collections import Counter
from io import BufferedReader
from math import isfinite
from pathlib import Path
from typing import Any

from gac.core.errors import UNSAFE, GacError

MAX_BYTES, MAX_COMMAS = 2**28, 2_000_000  # of a plan, a frontier or a report
CHECKPOINT_BYTES, CHECKPOINT_COMMAS = 2**26, 500_000  # of a JSON file of a model: 4,096 layers need a fifth of either
_PARSED = (
    *("config.json", "generation_config.json", "adapter_config.json"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
)
_UNBOUNDED = (".json", ".jinja", ".txt", ".model")
_MAX_LETTERS, _MAX_NAME_BYTES = 2**16, 255
MAX_INTEGER = 2**62  # of JSON: files that hold larger numbers are refused
_MAX_DIGITS = len(str(-MAX_INTEGER))
_BEYOND = object()
_CONTROL = re.compile(rf"(?![\t\n\r]){UNSAFE.pattern}")  # texts may have line breaks, as generation stops at


def check_inside(folder: Path, error: type[GacError]) -> None:
    """Refuse a directory with a symlink that leads out of it: its sender would choose what is read.

    Pipes and devices are refused too: reading them may never end. Symlinks of a Hugging Face cache are followed, from
    ``snapshots/REVISION`` to the ``blobs`` next to ``snapshots``.
    """
    if not os.path.isdir(folder):  # also of a name that no file system allows
        return
    root = Path(os.path.realpath(folder))  # resolve() raises other errors for links that go round
    homes = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    for path in _entries(folder):
        if path.is_symlink() and not any(Path(os.path.realpath(path)).is_relative_to(home) for home in homes):
            problem = f"{path} is a symlink to {path.readlink()}, outside of the directory"
            raise error(problem, "files of this directory", "Copy the file there if you trust it.")
        if not path.is_file() and not path.is_dir():
            raise error(f"{path} is no file: a pipe, a device, or a link to nothing", "files", "Remove it.")


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if os.path.isdir(folder) else []


def is_plain_name(name: object) -> bool:
    """Return True for the name of a directory's entry: no path elsewhere, no longer than file systems allow."""
    return (
        isinstance(name, str)
        and name not in ("", "..")
        and name == Path(name).name
        and "\\" not in name
        and not UNSAFE.search(name)
        and len(name.encode()) <= _MAX_NAME_BYTES
    )


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; OSError for a pipe, a device or a directory, which is not waited for."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def file_digest(path: Path) -> str:
    """SHA-256 of a regular file; OSError as for ``open_regular``."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(source: Path, what: str, expected: str, error: type[GacError]) -> bytes:
    """Read a file of at most ``MAX_BYTES`` that a user names; the error calls it ``what`` (``report``)."""
    try:
        with source.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as failure:
        raise error(f"{what} {source} cannot be read: {_reason(failure)}", expected, "Check the path.") from failure
    if len(text) > MAX_BYTES:
        raise error(f"{what} {source} is larger than {MAX_BYTES:,} bytes", f"a {what}", "Check the path.")
    return text


def read_document(path: str | Path, what: str, expected: str, error: type[GacError]) -> Any:
    """Read JSON that a user names, by ``parse_strictly``; arguments as for ``read_bytes``."""
    try:
        return parse_strictly(read_bytes(Path(path), what, expected, error), unsafe=_CONTROL)
    except ValueError as failure:
        raise error(f"{what} {path} cannot be read: {failure}", expected, "Check the path.") from failure


def read_model_json(path: Path, expected: str, error: type[GacError]) -> dict[str, Any]:
    """Read a JSON object in the directory of a model's weights: a regular file that ``parse_strictly`` takes."""
    try:
        with open_regular(path) as file:
            text = file.read(CHECKPOINT_BYTES + 1)
        if len(text) > CHECKPOINT_BYTES:
            raise ValueError(f"larger than {CHECKPOINT_BYTES:,} bytes")
        document = parse_strictly(text, CHECKPOINT_COMMAS, _CONTROL)
    except (OSError, ValueError) as failure:
        problem = f"{path} cannot be read: {_reason(failure)}"
        raise error(problem, expected, "Save or copy the model again.") from failure
    if not isinstance(document, dict):
        raise error(f"{path} holds a {type(document).__name__}", "a JSON object", "Check the path.")
    return document


def check_safetensors_header(path: Path) -> None:
    """Refuse a safetensors file whose header is too large, or is not JSON for ``parse_strictly`` (ValueError)."""
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > CHECKPOINT_BYTES:
            raise ValueError(f"a header of {length:,} bytes, more than {CHECKPOINT_BYTES:,}")
        parse_strictly(file.read(length), CHECKPOINT_COMMAS)


def check_model_files(folder: Path, error: type[GacError]) -> None:
    """Refuse unsafe files of a model that transformers would read without a limit.

    Configs and indices have to pass ``read_model_json``; a tokenizer's files have to be regular, of at most
    ``MAX_BYTES``.
    """
    for name in filter(lambda name: os.path.lexists(folder / name), _PARSED):
        read_model_json(folder / name, f"a {name} of a transformers model", error)
    for path in _entries(folder):
        if path.suffix not in _UNBOUNDED or not path.exists() or path.is_dir():
            continue
        if not path.is_file() or (size := path.stat().st_size) > MAX_BYTES:
            problem = f"of {size:,} bytes" if path.is_file() else "is a pipe or a device"
            raise error(f"{path} {problem}", f"a file of at most {MAX_BYTES:,} bytes", "Copy the model again.")


def _reason(failure: OSError | ValueError) -> str:
    return str((failure.strerror if isinstance(failure, OSError) else None) or failure)


class UnsafeJsonError(ValueError):
    """JSON that no file of GAC holds, though its types may be right."""


def parse_strictly(text: str | bytes, most_commas: int = MAX_COMMAS, unsafe: re.Pattern[str] = UNSAFE) -> Any:
    """Parse JSON with unique keys, finite numbers, integers up to 2**62, and strings without ``unsafe`` characters.

    An UnsafeJsonError says if the text breaks one of these rules, or has millions of values; a ValueError if it is no
    JSON, or is nested too deeply.
    """
    commas = text.count(",") if isinstance(text, str) else text.count(b",")
    if commas > most_commas:  # before values are made, which take the memory
        raise UnsafeJsonError(f"{commas:,} commas, more than {most_commas:,}")
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_int=_bounded)
    except UnsafeJsonError:
        raise
    except (ValueError, RecursionError) as failure:
        raise ValueError(f"Invalid JSON: {failure}") from failure
    _check_leaves(document, unsafe)
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise UnsafeJsonError(f"the key {key!r} is there twice")
    return members


def _bounded(text: str) -> Any:
    return _BEYOND if len(text) > _MAX_DIGITS or abs(int(text)) > MAX_INTEGER else int(text)


def _check_leaves(document: Any, unsafe: re.Pattern[str]) -> None:
    waiting: list[tuple[str, Any]] = [("the document", document)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, list):
            waiting += ((name, item) for item in value)
        elif isinstance(value, dict):
            waiting += ((key[:40], key) for key in value)
            waiting += ((key[:40], member) for key, member in value.items())
        elif isinstance(value, str) and unsafe.search(value):
            raise UnsafeJsonError(f"{name!r} holds a control character: {value[:40]!r}")
        elif isinstance(value, str) and len(value) > _MAX_LETTERS:
            raise UnsafeJsonError(f"{name}: a string of {len(value):,} characters")
        elif value is _BEYOND:
            raise UnsafeJsonError(f"{name}: an integer beyond 2**62")
        elif isinstance(value, float) and not isfinite(value):
            raise UnsafeJsonError(f"{name}: {value}, which is no finite number")
