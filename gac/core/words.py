"""Numbers as tables, pages and messages write them."""

from collections.abc import Sequence
from itertools import groupby
from math import floor, log10


def duration(ns: int | None) -> str:
    """For example ``30.4 µs``; ``unknown`` for None."""
    if ns is None:
        return "unknown"
    if abs(ns) < 1_000:
        return f"{ns} ns"
    return f"{ns / 1e3:,.1f} µs" if abs(ns) < 1_000_000 else f"{ns / 1e6:,.3f} ms"


def nats(loss: float) -> str:
    """Three significant digits, written out down to a millionth."""
    if not 1e-6 <= abs(loss) < 1:
        return f"{loss:.3g}"
    return f"{loss:.{2 - floor(log10(abs(loss)))}f}"


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending integers, neighbours drawn together: ``0-4, 7``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def number_of(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
