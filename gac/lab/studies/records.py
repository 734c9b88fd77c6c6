"""A study, its finding and its result: measured figures compared with published ones, and the verdict."""

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from gac.lab.studies.readings import Readings, RefusedError, label
from gac.lab.studies.words import ABSENT, close, times
from gac.profiling.records import Measurement, Point

Verdict = Literal["held", "did not hold", "other"]
Cell = str | int | float | None
Find = Callable[[Point], Measurement | None]

_TEXTS = tomllib.loads(Path(__file__).with_name("studies.toml").read_text(encoding="utf-8"))
_OPENINGS: dict[Verdict, str] = {"held": "Holds", "did not hold": "Does not hold", "other": "Differs"}


@dataclass(frozen=True)
class Column:
    """A column of a study's table.

    Attributes:
        heading: its content; published columns name their GPU.
        unit: ``ms``, ``us``, ``TFLOP/s``, ``GB/s``, ``x`` (a ratio), ``%``; empty where there is none.
        side: ``<`` for text, ``>`` for numbers.
    """

    heading: str
    unit: str = ""
    side: Literal["<", ">"] = ">"

    @classmethod
    def parse(cls, text: str) -> "Column":
        """Read ``<backend`` (text), ``head_dim`` (a number) or ``measured|ms`` (a number with its unit)."""
        heading, _, unit = text.removeprefix("<").partition("|")
        return cls(heading, unit, "<" if text.startswith("<") else ">")


class Finding(NamedTuple):
    """A study's table, whether the effect is as published or absent, and its figures in a sentence.

    ``headings`` are as ``Column.parse`` takes them; rows have one cell a column, None where there is no figure.
    """

    headings: tuple[str, ...]
    rows: Iterable[tuple[Cell, ...]]
    as_published: bool
    absent: bool
    sentence: str
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return "did not hold" if self.absent else "held" if self.as_published else "other"


@dataclass(frozen=True)
class StudyResult:
    """A study's table and verdict on one GPU.

    Attributes:
        study: the study's name.
        claim: the published sentence or figure.
        source: who measured it, on which GPU.
        columns: of the table, measured figures beside published ones.
        rows: one cell a column: text, a number in the column's unit, or None where there is none.
        verdict: ``held``; ``did not hold``: the effect is absent; ``other``: it is there in another form or size, or
            the GPU refuses what the verdict rests on.
        sentence: whether the claim holds on this GPU, with the figures.
        notes: the rule behind the verdict, and refused points with the reason.
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
        title: a few words.
        claim: the published sentence or figure.
        source: who measured it, on which GPU.
        rule: the thresholds of the verdict.
        list_points: lists the points to time.
        assess: makes the table and the verdict from the timings.
    """

    name: str
    title: str
    claim: str
    source: str
    rule: str
    list_points: Callable[[], Iterable[Point]]
    assess: Callable[[Readings], Finding]

    def points(self) -> tuple[Point, ...]:
        """The points to time, each once."""
        return tuple(dict.fromkeys(self.list_points()))

    def judge(self, find: Find) -> StudyResult:
        """The table and the verdict, from measurements alone.

        Args:
            find: the measurement of a point; None where it was not measured.

        Raises:
            ProfileError: points were not measured, or a verdict by kernels lacks them.
        """
        readings = Readings.of(self.name, self.points(), find)
        try:
            finding = self.assess(readings)
            sentence = f"{_OPENINGS[finding.verdict]} on this GPU: {finding.sentence}."
        except RefusedError as reason:
            refused = [(label(point), row.error) for point, row in readings.rows.items() if row.error is not None]
            finding = Finding(("<refused", "<reason"), refused, as_published=False, absent=False, sentence="")
            sentence = f"Cannot be told on this GPU, which refuses {reason}."
        columns, rows = tuple(map(Column.parse, finding.headings)), tuple(finding.rows)
        notes = (self.rule, *finding.notes, *readings.refusals)
        return StudyResult(self.name, self.claim, self.source, columns, rows, finding.verdict, sentence, notes)


def study(name: str, list_points: Callable[[], Iterable[Point]]) -> Callable[[Callable[[Readings], Finding]], Study]:
    """Make a ``Study`` of the decorated function, which assesses its readings; ``studies.toml`` has its texts."""
    return lambda assess: Study(name=name, **_TEXTS[name], list_points=list_points, assess=assess)


@dataclass(frozen=True)
class Band:
    """The published range of a figure, from ``least`` to ``most``; below ``absent`` there is no effect.

    ``write`` is ``times`` for factors and ``percent`` for shares.
    """

    least: float
    most: float
    absent: float = ABSENT
    write: Callable[..., str] = times

    def finding(
        self, figure: float, sentence: str, headings: tuple[str, ...], rows: Iterable[tuple[Cell, ...]], *notes: str
    ) -> Finding:
        """The verdict by one figure, which replaces the braces in ``sentence``, and has a note near an edge."""
        edges = (self.absent, self.least, self.most)
        text = sentence.replace("{}", self.write(figure, *edges), 1)
        as_published, absent = self.least <= figure <= self.most, figure < self.absent
        return Finding(
            headings, rows, as_published, absent, text, (*notes, *close("", figure, *edges, write=self.write))
        )
