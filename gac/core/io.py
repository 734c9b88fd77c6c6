"""Files at the boundary: complete or absent, validated when read."""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from gac.core.arguments import checked
from gac.core.errors import GacError
from gac.core.untrusted import parse_strictly, read_bytes

T = TypeVar("T")

# Errors of file systems that cannot sync a directory, and of a directory that may not be read.
_NOT_FOR_DIRECTORIES = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES})


def home() -> Path:
    """Return the directory of measurements on this machine: ``$GAC_HOME``, or ``~/.cache/gac``."""
    return Path(os.environ.get("GAC_HOME") or Path.home() / ".cache" / "gac")


def destination(path: Path, directory: bool = False) -> Path:
    """Return the path to write a file, or a directory, to in place of ``path``: symlinks are followed, and stay.

    An OSError says if something else is there (a device), symlinks lead nowhere, or the name is not UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:  # libraries that write the file take the name as UTF-8
        raise OSError(errno.EILSEQ, "its name is not UTF-8", ascii(path)) from None
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return Path(os.path.realpath(path))
    if not (stat.S_ISDIR if directory else stat.S_ISREG)(mode):
        what = "directory" if directory else "regular file"
        raise FileExistsError(errno.EEXIST, f"it exists and is no {what}", str(path))
    return Path(os.path.realpath(path))


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name in the folder of ``path``; rename it onto ``path`` on success, remove it on failure.

    The content is on the disk before the name is, and the name before this returns. A process that is killed leaves
    a hidden ``.part`` file, which nothing reads. Raises OSError as ``destination`` does.
    """
    path = destination(path)
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
    """Write the names in a directory to disk, where the system can: a new file's name is not part of the file."""
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
    """Write a frozen dataclass as JSON; NaN and infinity are never written as numbers."""
    written: bytes = _adapter(type(value)).dump_json(value, indent=indent, by_alias=True)  # type: ignore[arg-type]  # is hashable
    return written


def from_json(kind: type[T], text: str | bytes, what: str, error: type[GacError]) -> T:
    """Read a frozen dataclass, strictly: unknown keys, wrong types and missing fields are errors.

    So are duplicate keys, integers beyond 2**62, control characters, and millions of values. The error calls the
    source ``what``, and names the path to the first wrong field.
    """
    from pydantic import ValidationError

    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    expected = f"{article} {kind.__name__} as this version of GAC writes it"
    remedy = "Make it again, or open it with the version of GAC that wrote it."
    try:
        parse_strictly(text)  # before pydantic keeps an error for each of millions of values
        record: T = _adapter(kind).validate_json(text, strict=True)  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as failure:
        first = failure.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise error(f"{what}: {field}: {first['msg']}", expected, remedy) from failure
    except ValueError as failure:
        raise error(f"{what}: {failure}", expected, remedy) from failure
    return record


@cache
def _adapter(kind: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


@contextmanager
def complete_file(path: Path, what: str, error: type[GacError] = GacError) -> Iterator[Path]:
    """``atomic_path`` for a path that the user has chosen; the error calls the content ``what``."""
    try:
        with atomic_path(path) as temporary:
            yield temporary
    except OSError as failure:
        problem = f"{what} cannot be written to {path}: {failure.strerror}"
        raise error(problem, "a writable path", "Choose another path.") from failure


_KINDS = {  # documents that users confuse, by a field that others lack; the remedy
    "points": ("a frontier", "Save a plan of it: gac.Frontier.load(path).plan(index).save(file), or use gac allocate."),
    "press": ("a plan of tokens kept", "Evict with gac.press; gac allocate makes plans of weights."),
    "turns": ("a bench of an engine", "Draw it with gac plot speeds; gac allocate makes plans of weights."),
    "results": ("a bench", "Name another file; gac allocate makes plans of weights."),
    "prediction": ("a plan of weights", "Apply it with gac compress; gac tokens makes plans of tokens kept."),
}


class Record:
    """A frozen dataclass that is stored as a JSON file; errors call it by the name of its class.

    Unknown fields and infinities are refused, in nested records too.
    """

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012
    _error: ClassVar[type[GacError]] = GacError
    _indent: ClassVar[int | None] = 1

    @checked
    def save(self, path: str | Path) -> None:
        """Write it as JSON; the file is complete or absent."""
        with complete_file(Path(path), type(self).__name__.lower(), self._error) as temporary:
            temporary.write_bytes(to_json(self, self._indent) + b"\n")

    def _check_schema(self, version: int, known: int) -> None:
        if version != known:
            what = type(self).__name__.lower()
            remedy = f"Make the {what} again with this version of GAC."
            raise self._error(f"{what} has schema version {version}", f"version {known}", remedy)

    @classmethod
    def opened(cls, record: Self | str | Path) -> Self:
        """Return a record as it is, or the one in the file of this path; errors as for ``load``."""
        if isinstance(record, cls):
            return record
        if not isinstance(record, (str, Path)):
            wrong, what = type(record).__name__, cls.__name__
            raise cls._error(f"a {wrong} as a {what.lower()}", f"a {what}, or the path of one", "Pass one of these.")
        return cls.load(record)

    @classmethod
    def opened_each(cls, records: Mapping[str, Self | str | Path]) -> dict[str, Self]:
        """``opened`` of each, by name."""
        return {name: cls.opened(record) for name, record in records.items()}

    @classmethod
    @checked
    def load(cls, path: str | Path) -> Self:
        """Read a record, and check it as when it was made; missing optional fields take their defaults.

        A GacError says if the file is unreadable, is none, or contradicts itself; it names the path to the field.
        """
        source, what = Path(path), cls.__name__.lower()
        expected = f"a {what} written by {cls.__name__}.save"
        text = read_bytes(source, what, expected, cls._error)
        try:
            return from_json(cls, text, f"{what} {source}", cls._error)
        except GacError:
            with suppress(ValueError):
                document: Any = parse_strictly(text)
                for field, (kind, remedy) in _KINDS.items() if isinstance(document, dict) else ():
                    if field in document and field not in cls.__dataclass_fields__:  # type: ignore[attr-defined]
                        raise cls._error(f"{source}, which is {kind}", expected, remedy) from None
            raise
