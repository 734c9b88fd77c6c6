"""Factors and shares in words, with enough digits to differ from their thresholds."""

from collections.abc import Callable

ABSENT = 1.05  # A slowdown below this is no effect
NOISE = 0.03  # two latencies that differ by less than this are the same

CLOSE = 0.05
"""A figure this near to its threshold, as a fraction of it, may fall on the other side when it is measured again."""


def times(factor: float, *edges: float) -> str:
    """A factor, ``2.42x``, with enough digits to differ from every edge that it differs from."""
    return _distinct(factor, edges, lambda value, digits: f"{value:.{2 + digits}f}x")


def percent(share: float, *edges: float) -> str:
    """A share, ``58 %``, with enough digits to differ from every edge; never ``-0 %``."""
    return _distinct(share, edges, lambda value, digits: f"{round(100 * value, digits) + 0.0:.{digits}f} %")


def _distinct(value: float, edges: tuple[float, ...], write: Callable[[float, int], str]) -> str:
    for digits in range(4):
        if write(value, digits) not in {write(edge, digits) for edge in edges if edge != value}:
            return write(value, digits)
    return write(value, 4)


def close(name: str, value: float, *edges: float, write: Callable[..., str] = times) -> tuple[str, ...]:
    """A note for every edge that a deciding figure lies within 5 % of; ``name`` is empty where it is the only one."""
    return tuple(
        f"close to the edge: {name}{' ' if name else ''}{write(value, edge)}, edge {write(edge)}"
        for edge in edges
        if abs(value - edge) <= CLOSE * edge
    )
