"""Read a directory that another process may replace at any moment, as ``save`` does with ``overwrite``."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from gac.core.errors import CheckpointError, GacError
from gac.models.loading import UNREADABLE

T = TypeVar("T")
ATTEMPTS = 5


def read_unreplaced(directory: Path, read: Callable[[], T], attempts: int = ATTEMPTS) -> T:
    """Return what ``read`` makes of a directory, all of it from the files of one and the same.

    A directory that replaces another has the same name and files of its own, so a reader that opens files one by one
    may get some of each. Such a reading counts for nothing, whether it failed or not, and is done again.

    Args:
        attempts: how often it is read at most.
    """
    for _ in range(attempts):
        with _same_directory(directory) as is_same:
            try:
                result = read()
            except (GacError, *UNREADABLE):
                if is_same():
                    raise
                continue
            if is_same():
                return result
    raise CheckpointError(
        f"{directory} was replaced while it was read ({attempts} of {attempts} times)",
        "a directory that nothing writes to",
        "Open it again when it is complete.",
    )


@contextmanager
def _same_directory(path: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns False once the path leads to another directory than it does now.

    Until then that directory is held open where the system can, so that no new one is given its number.
    """
    before, handle = _stat(path), None
    with suppress(OSError, ValueError):
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        before = os.fstat(handle)

    def is_same() -> bool:
        after = _stat(path)
        return before is after or (before is not None and after is not None and os.path.samestat(before, after))

    try:
        yield is_same
    finally:
        if handle is not None:
            os.close(handle)


def _stat(path: Path) -> os.stat_result | None:
    with suppress(OSError, ValueError):
        return path.stat()
    return None
