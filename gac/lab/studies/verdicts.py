"""From a factor to a verdict, its sentence, and its distance from the verdict's thresholds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gac.lab.studies.records import Cell, Finding

ABSENT = 1.05
"""A slowdown below this is no effect."""

NOISE = 0.03
"""Two latencies that differ by less than this are the same."""

CLOSE = 0.05
"""A figure this near to its threshold, as a share of it, may fall on the other side when it is measured again."""


def times(factor: float, *edges: float) -> str:
    """A factor in words, ``2.42x``, with enough digits to differ from every edge that it differs from."""
    return _apart(factor, edges, lambda value, digits: f"{value:.{2 + digits}f}x")


def percent(share: float, *edges: float) -> str:
    """A share in words, ``58 %``, with enough digits to differ from every edge; never ``-0 %``."""
    return _apart(share, edges, lambda value, digits: f"{round(100 * value, digits) + 0.0:.{digits}f} %")


def _apart(value: float, edges: tuple[float, ...], write: Callable[[float, int], str]) -> str:
    """The shortest text, by at most four more digits, that is not also the text of another figure among the edges."""
    for digits in range(4):
        if write(value, digits) not in {write(edge, digits) for edge in edges if edge != value}:
            return write(value, digits)
    return write(value, 4)


def close(what: str, value: float, *edges: float, write: Callable[..., str] = times) -> tuple[str, ...]:
    """A note for every edge that a deciding figure lies within 5 % of.

    Args:
        what: the figure's name, empty where a study has but one.
        value: the figure.
        edges: the thresholds it is compared with.
        write: ``times`` for factors, ``percent`` for shares.
    """
    name = f"{what} " if what else ""
    return tuple(
        f"close to the edge: {name}{write(value, edge)}, edge {write(edge)}"
        for edge in edges
        if abs(value - edge) <= CLOSE * edge
    )


@dataclass(frozen=True)
class Band:
    """The published range of a figure.

    Attributes:
        least, most: the ends of the range.
        absent: a figure below this is no effect.
        write: ``times`` for factors, ``percent`` for shares.
    """

    least: float
    most: float
    absent: float = ABSENT
    write: Callable[..., str] = times

    @property
    def edges(self) -> tuple[float, float, float]:
        """What a figure is compared with."""
        return self.absent, self.least, self.most

    def rule(self, what: str) -> str:
        """The rule that ``finding`` follows, in words."""
        least, most, absent = (self.write(edge) for edge in (self.least, self.most, self.absent))
        return (
            f"rule: {what}; held from {least} to {most}, did not hold below {absent}, "
            "other where it is smaller or larger than published"
        )

    def finding(
        self, figure: float, said: str, headings: tuple[str, ...], rows: Iterable[tuple[Cell, ...]], *notes: str
    ) -> Finding:
        """What one figure decides; it stands in ``said`` for the braces, and near an edge it has a note."""
        edges = close("", figure, *self.edges, write=self.write)
        text = said.replace("{}", self.write(figure, *self.edges), 1)
        held, absent = self.least <= figure <= self.most, figure < self.absent
        return Finding(headings, rows, held, absent, text, (*notes, *edges))
