"""What a command checks before minutes of work: where it may write."""

from pathlib import Path
from tempfile import TemporaryFile

from gac.errors import GacError


def check_writable(path: Path, error: type[GacError]) -> None:
    """Refuse a path in a place that cannot be written.

    Raises:
        GacError: of the class ``error``.
    """
    try:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
    except OSError as failure:
        raise error(f"{path}: {failure.strerror}", "a writable path", "Choose another path.") from failure
    if not folder.is_dir():
        raise error(f"{path}: {folder} is a file", "a path below a directory", "Choose another path.")
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as failure:
        given = f"{path}: nothing can be written to {folder}: {failure.strerror}"
        raise error(given, "a writable path", "Choose another path.") from failure


def check_file(path: Path, error: type[GacError]) -> None:
    """Refuse a path that no file can be written to.

    Raises:
        GacError: of the class ``error``.
    """
    try:
        if path.is_dir():
            raise error(f"{path} is a directory", "the path of a file", "Name a file in it.")
    except OSError as failure:
        raise error(f"{path}: {failure.strerror}", "the path of a file", "Choose another path.") from failure
    check_writable(path, error)
