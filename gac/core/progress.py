"""Progress of long work: a bar on a terminal, elsewhere a line a minute, both on standard error."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from io import StringIO
from typing import Any

from tqdm import tqdm

_SECONDS = 60.0
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s after {elapsed}, about {remaining} left"
_silent = ContextVar("silent", default=False)


def rough_duration(seconds: float) -> str:
    return f"about {max(seconds / 60, 0.1):.1f} minutes"


@contextmanager
def no_progress() -> Iterator[None]:
    before = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(before)


def has_bars() -> bool:
    return not _silent.get() and sys.stderr.isatty()


def progress_bar(
    what: str,
    unit: str,
    total: int | None = None,
    steps: Iterable[Any] | None = None,
    shown: bool = True,
    leave: bool = True,
) -> "tqdm[Any]":
    """Make a bar whose ``update()`` counts a unit; where no bar can be drawn it prints a line a minute.

    ``steps`` are iterated over, in place of ``update()``; ``leave`` says if the bar stays when all is done.
    """
    options: dict[str, Any] = {"desc": what, "unit": unit, "total": total, "leave": leave}
    if not shown or _silent.get():
        return tqdm(steps, disable=True, **options)
    return tqdm(steps, **options) if has_bars() else _Lines(steps, file=StringIO(), bar_format=_LINE, **options)


class _Lines(tqdm):  # type: ignore[type-arg]  # generic in its stubs alone
    def __init__(self, *args: Any, **options: Any) -> None:
        self._printed = time.monotonic()
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        now = time.monotonic()
        if now - self._printed >= _SECONDS:
            self._printed = now
            print(self, file=sys.stderr, flush=True)
