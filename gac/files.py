"""Files at the boundary: whole or absent, validated when read."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gac.errors import GacError

T = TypeVar("T")

# What file systems say that cannot sync a directory, and one that may not be read.
_NOT_FOR_DIRECTORIES = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES})


def home() -> Path:
    """Where GAC keeps what it measured on this machine: ``$GAC_HOME``, or ``~/.cache/gac``."""
    return Path(os.environ.get("GAC_HOME") or Path.home() / ".cache" / "gac")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; rename it onto ``path`` on success, remove it on failure.

    The content is on the disk before the name is, and the name before this returns. A process that is killed leaves
    a hidden ``.part`` file, which nothing reads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        open_to_umask(temporary)
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk, where the system can: a new file's name is not part of the file."""
    if os.name != "posix":
        return
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as failure:
        if failure.errno not in _NOT_FOR_DIRECTORIES:
            raise


def open_to_umask(path: Path) -> None:
    """Give a file the mode that ``open`` would have given it; temporary files are private when they are made."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def to_json(value: Any, indent: int | None = None) -> bytes:
    """A frozen dataclass as JSON; NaN and infinity are refused by never being written as numbers."""
    from pydantic import TypeAdapter

    return TypeAdapter(type(value)).dump_json(value, indent=indent)


def from_json(kind: type[T], text: str | bytes, what: str, error: type[GacError]) -> T:
    """Read a frozen dataclass back, strictly: unknown keys, wrong types and missing fields are errors.

    Args:
        kind: the dataclass; its ``__pydantic_config__`` should forbid extra keys.
        what: how to name the source in an error (a path, a line).
        error: which ``GacError`` to raise.

    Raises:
        GacError: of the class ``error``, naming the path to the first wrong field.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as failure:
        first = failure.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise error(
            f"{what}: {field}: {first['msg']}",
            f"a {kind.__name__} as this version of GAC writes it",
            "Make it again, or open it with the version of GAC that wrote it.",
        ) from failure


def write_record(record: Any, path: str | Path, what: str, error: type[GacError], indent: int | None = None) -> None:
    """Write a frozen dataclass as a JSON file that is whole or absent.

    Args:
        what: how to name it in an error: ``plan``.
        error: which ``GacError`` to raise.

    Raises:
        GacError: of the class ``error``, where the path cannot be written.
    """
    target = Path(path)
    try:
        with atomic_path(target) as temporary:
            temporary.write_bytes(to_json(record, indent) + b"\n")
    except OSError as failure:
        raise error(
            f"{what} cannot be written to {target}: {failure.strerror}", "a writable path", "Choose another path."
        ) from failure


def read_record(kind: type[T], path: str | Path, what: str, error: type[GacError]) -> T:
    """Read back what ``write_record`` wrote, as strictly as ``from_json``.

    Raises:
        GacError: of the class ``error``, where the file cannot be read or is none.
    """
    source = Path(path)
    try:
        text = source.read_bytes()
    except OSError as failure:
        raise error(
            f"{what} {source} cannot be read: {failure.strerror}",
            f"a {what} written by {kind.__name__}.save",
            "Check the path.",
        ) from failure
    return from_json(kind, text, f"{what} {source}", error)
