"""Files at the boundary: whole or absent, validated when read."""

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
from gac.core.untrusted import UnsafeJsonError, parse_strictly, read_bytes, read_document

T = TypeVar("T")

# What file systems say that cannot sync a directory, and one that may not be read.
_NOT_FOR_DIRECTORIES = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES})

# Of Linux's renameat2, and what it says where the file system cannot exchange.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


def home() -> Path:
    """Where GAC keeps what it measured on this machine: ``$GAC_HOME``, or ``~/.cache/gac``."""
    return Path(os.environ.get("GAC_HOME") or Path.home() / ".cache" / "gac")


def destination(path: Path, directory: bool = False) -> Path:
    """Where something that is called ``path`` is written: where symlinks lead, so that these stay.

    Args:
        directory: whether a directory is written, or a file.

    Raises:
        OSError: something else is there (a device, a FIFO), symlinks lead nowhere, or the name is not UTF-8.
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
        raise FileExistsError(errno.EEXIST, f"what is there is no {what}", str(path))
    return Path(os.path.realpath(path))


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; rename it onto ``path`` on success, remove it on failure.

    The content is on the disk before the name is, and the name before this returns. A process that is killed leaves
    a hidden ``.part`` file, which nothing reads. Where ``path`` is a symlink, the file that it names is replaced.

    Raises:
        OSError: it cannot be written, or what is there is no regular file.
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


def exchange(first: Path, second: Path) -> bool:
    """Let two names of a file system swap what they name, in one step: at no time is either of them nothing.

    Returns:
        False where there is no such step: it is Linux's, and not all file systems have it.

    Raises:
        OSError: as a rename does.
    """
    import ctypes

    if not hasattr(library := ctypes.CDLL(None, use_errno=True), "renameat2"):
        return False
    if library.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def open_to_umask(path: Path) -> None:
    """Give a file the mode that ``open`` would have given it; temporary files are private when they are made."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def to_json(value: Any, indent: int | None = None) -> bytes:
    """A frozen dataclass as JSON; NaN and infinity are refused by never being written as numbers."""
    written: bytes = _adapter(type(value)).dump_json(value, indent=indent, by_alias=True)  # type: ignore[arg-type]  # is hashable
    return written


def from_json(kind: type[T], text: str | bytes, what: str, error: type[GacError]) -> T:
    """Read a frozen dataclass back, strictly: unknown keys, wrong types and missing fields are errors.

    So are keys that are there twice, integers beyond 2**62, control characters, and millions of values.

    Args:
        kind: the dataclass; its ``__pydantic_config__`` should forbid extra keys.
        what: how to name the source in an error (a path, a line).
        error: which ``GacError`` to raise.

    Raises:
        GacError: of the class ``error``, naming the path to the first wrong field.
    """
    from pydantic import ValidationError

    expected = f"a {kind.__name__} as this version of GAC writes it"
    remedy = "Make it again, or open it with the version of GAC that wrote it."
    invalid: ValueError | None = None
    try:
        parse_strictly(text)
    except UnsafeJsonError as failure:  # before pydantic keeps an error for each of millions of values
        raise error(f"{what}: {failure}", expected, remedy) from failure
    except ValueError as failure:
        invalid = failure
    try:
        found: T = _adapter(kind).validate_json(text, strict=True)  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as failure:
        first = failure.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise error(f"{what}: {field}: {first['msg']}", expected, remedy) from failure
    if invalid:  # what one of two readers cannot read is not read
        raise error(f"{what}: {invalid}", expected, remedy)
    return found


@cache
def _adapter(kind: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


@contextmanager
def whole_file(path: Path, what: str, error: type[GacError] = GacError) -> Iterator[Path]:
    """``atomic_path`` for a path that somebody has chosen.

    Args:
        what: how to name the content in an error: ``plan``.
        error: which ``GacError`` to raise.

    Raises:
        GacError: of the class ``error``, where the path cannot be written.
    """
    try:
        with atomic_path(path) as temporary:
            yield temporary
    except OSError as failure:
        raise error(
            f"{what} cannot be written to {path}: {failure.strerror}", "a writable path", "Choose another path."
        ) from failure


class Record:
    """A frozen dataclass that is kept as a JSON file; errors call it by the name of its class.

    Read are its own fields and no others, nor infinities, in whatever it consists of.
    """

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012
    _error: ClassVar[type[GacError]] = GacError
    _indent: ClassVar[int | None] = 1
    _taken_for: ClassVar[tuple[str, str, str] | None] = None
    """A field of another kind of record that is taken for this one, what that is, and what to do with it."""

    @checked
    def save(self, path: str | Path) -> None:
        """Write it as JSON; the file is whole or absent.

        Raises:
            GacError: the path cannot be written.
        """
        with whole_file(Path(path), type(self).__name__.lower(), self._error) as temporary:
            temporary.write_bytes(to_json(self, self._indent) + b"\n")

    def _check_schema(self, version: int, known: int) -> None:
        if version != known:
            what = type(self).__name__.lower()
            remedy = f"Make the {what} again with this version of GAC."
            raise self._error(f"{what} has schema version {version}", f"version {known}", remedy)

    @classmethod
    def opened(cls, given: Self | str | Path) -> Self:
        """One that is at hand as it is, or the one in the file of this path.

        Raises:
            GacError: it is neither, or as for ``load``.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, (str, Path)):
            wrong, what = type(given).__name__, cls.__name__
            raise cls._error(f"a {wrong} as a {what.lower()}", f"a {what}, or the path of one", "Pass one of these.")
        return cls.load(given)

    @classmethod
    def opened_each(cls, given: Mapping[str, Self | str | Path]) -> dict[str, Self]:
        """``opened`` of each, by name."""
        return {name: cls.opened(one) for name, one in given.items()}

    @classmethod
    @checked
    def load(cls, path: str | Path) -> Self:
        """Read it back, and check it as when it was made; of what may be left out, defaults are taken.

        Raises:
            GacError: the file is unreadable, is none, or contradicts itself; names the path to the field.
        """
        source, what = Path(path), cls.__name__.lower()
        expected = f"a {what} written by {cls.__name__}.save"
        text = read_bytes(source, what, expected, cls._error)
        try:
            return from_json(cls, text, f"{what} {source}", cls._error)
        except GacError:
            field, told, remedy = cls._taken_for or ("", "", "")
            document = None
            with suppress(GacError):
                document = read_document(source, what, expected, cls._error)
            if isinstance(document, dict) and field in document:
                raise cls._error(f"{source}, which is {told}", expected, remedy) from None
            raise
