"""Files at the boundary: whole or absent, validated when read."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gac.errors import GacError

T = TypeVar("T")


def home() -> Path:
    """Where GAC keeps what it measured on this machine: ``$GAC_HOME``, or ``~/.cache/gac``."""
    return Path(os.environ.get("GAC_HOME") or Path.home() / ".cache" / "gac")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; rename it onto ``path`` on success, remove it on failure."""
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
    finally:
        temporary.unlink(missing_ok=True)


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
