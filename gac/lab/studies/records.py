"""A study and its findings: measured figures beside published ones, and from a factor to whether the claim holds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gac.lab.studies.readings import Readings, RefusedError, label
from gac.profiling.records import Measurement, Point

Verdict = Literal["held", "did not hold", "other"]
Cell = str | int | float | None
Find = Callable[[Point], Measurement | None]

_OPENINGS: dict[Verdict, str] = {"held": "Holds", "did not hold": "Does not hold", "other": "Differs"}


@dataclass(frozen=True)
class Column:
    """A column of a study's table.

    Attributes:
        heading: what it holds; published columns name their GPU.
        unit: ``ms``, ``us``, ``TFLOP/s``, ``GB/s``, ``x`` (a ratio), ``%``; empty where there is none.
        side: ``<`` for text, ``>`` for numbers.
    """

    heading: str
    unit: str = ""
    side: Literal["<", ">"] = ">"


def columns(*texts: str) -> tuple[Column, ...]:
    """Columns from ``<backend`` (text), ``head_dim`` (a number) and ``measured|ms`` (a number with its unit)."""
    split = (text.removeprefix("<").partition("|") for text in texts)
    return tuple(
        Column(heading, unit, "<" if text.startswith("<") else ">")
        for text, (heading, _, unit) in zip(texts, split, strict=True)
    )


@dataclass(frozen=True)
class Finding:
    """A study's table, whether the effect is as published or absent, and its figures in words.

    ``headings`` are as ``columns`` takes them; rows have one cell a column, None where there is no figure.
    """

    headings: tuple[str, ...]
    rows: Iterable[tuple[Cell, ...]]
    held: bool
    absent: bool
    said: str
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """``other`` where the effect is there, but not as published."""
        if self.absent:
            return "did not hold"
        return "held" if self.held else "other"


@dataclass(frozen=True)
class StudyResult:
    """A study's table and verdict on one GPU.

    Attributes:
        study: the study's name.
        claim: the published sentence or figure.
        source: whose, measured on what.
        columns: of the table, measured figures beside published ones.
        rows: one cell a column: text, a number in the column's unit, or None where there is none.
        verdict: ``held``; ``did not hold``: the effect is absent; ``other``: it is there in another form or size, or
            the GPU refuses what the verdict rests on.
        sentence: one line: whether the claim holds on this GPU, with the figures.
        notes: the rule behind the verdict, and what was refused, with its reason.
    """

    study: str
    claim: str
    source: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    verdict: Verdict
    sentence: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """A published experiment that runs again on the GPU at hand.

    Attributes:
        name: as in ``gac study NAME``.
        title: what it is about, a few words.
        claim: the published sentence or figure.
        source: whose, measured on what.
        rule: the thresholds that the verdict rests on.
        plan: the points to time.
        assess: from the timings to the table and the verdict.
    """

    name: str
    title: str
    claim: str
    source: str
    rule: str
    plan: Callable[[], tuple[Point, ...]]
    assess: Callable[[Readings], Finding]

    def points(self) -> tuple[Point, ...]:
        """What is timed, each point once."""
        return tuple(dict.fromkeys(self.plan()))

    def judge(self, find: Find) -> StudyResult:
        """The table and the verdict, from measurements alone.

        Args:
            find: the measurement of a point; None where it was not measured.

        Raises:
            ProfileError: points were not measured, or a verdict by kernels lacks them.
        """
        readings = Readings.of(self.name, self.points(), find)
        try:
            found = self.assess(readings)
            sentence = f"{_OPENINGS[found.verdict]} on this GPU: {found.said}."
        except RefusedError as reason:
            refused = ((label(point), row.error) for point, row in readings.rows.items() if row.error is not None)
            found = Finding(("<refused", "<reason"), refused, held=False, absent=False, said="")
            sentence = f"Cannot be told on this GPU, which refuses {reason}."
        table, rows = columns(*found.headings), tuple(found.rows)
        notes = (self.rule, *found.notes, *readings.refusals)
        return StudyResult(self.name, self.claim, self.source, table, rows, found.verdict, sentence, notes)


def study(
    name: str, title: str, claim: str, source: str, rule: str, plan: Callable[[], tuple[Point, ...]]
) -> Callable[[Callable[[Readings], Finding]], Study]:
    """The decorator that makes a ``Study`` of the function that assesses its readings."""
    return partial(Study, name, title, claim, source, rule, plan)


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
