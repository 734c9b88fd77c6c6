"""How far long work is: a bar on a terminal, elsewhere a line a minute, both on standard error."""

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


@contextmanager
def no_progress() -> Iterator[None]:
    """Nothing is shown of progress inside."""
    before = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(before)


def has_bars() -> bool:
    """Whether progress is shown as bars: on a terminal, outside of ``no_progress``."""
    return not _silent.get() and sys.stderr.isatty()


def progress_bar(
    what: str,
    unit: str,
    total: int | None = None,
    steps: Iterable[Any] | None = None,
    shown: bool = True,
    leave: bool = True,
) -> "tqdm[Any]":
    """A bar, whose ``update()`` says that a unit is done; where no bar can be drawn it says a line a minute.

    Args:
        what: is done: ``calibrating``.
        unit: what is counted: ``window``.
        steps: to iterate over, in place of ``update()``.
        shown: False shows nothing, as the caller asked.
        leave: whether the bar stays when all is done.
    """
    how: dict[str, Any] = {"desc": what, "unit": unit, "total": total, "leave": leave}
    if not shown or _silent.get():
        return tqdm(steps, disable=True, **how)
    return tqdm(steps, **how) if has_bars() else _Lines(steps, file=StringIO(), bar_format=_LINE, **how)


class _Lines(tqdm):  # type: ignore[type-arg]  # generic in its stubs alone
    """Says a line a minute; what tqdm itself writes goes nowhere."""

    def __init__(self, *given: Any, **how: Any) -> None:
        self._said = time.monotonic()
        super().__init__(*given, **how)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        now = time.monotonic()
        if now - self._said >= _SECONDS:
            self._said = now
            print(self, file=sys.stderr, flush=True)
