"""A study, its finding and its result: measured figures compared with published ones, and the verdict."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gac.profiling.records import Measurement, Point
from gac_extensions.lab.studies.readings import Readings, RefusedError, close, percent, times

Verdict = Literal["held", "did not hold", "other"]
Cell = str | int | float | None
Find = Callable[[Point], Measurement | None]
Assess = Callable[..., "Finding"]

TEXTS = tomllib.loads(Path(__file__).with_name("studies.toml").read_text(encoding="utf-8"))
_OPENINGS: dict[Verdict, str] = {"held": "Holds", "did not hold": "Does not hold", "other": "Differs"}


@dataclass(frozen=True)
class Column:
    """A column of a study's table; ``side`` is ``<`` for text, ``>`` for numbers."""

    heading: str
    unit: str = ""
    side: Literal["<", ">"] = ">"

    @classmethod
    def parse(cls, text: str) -> "Column":
        """Read ``<backend`` (text), ``head_dim`` (a number) or ``measured|ms`` (a number with its unit)."""
        heading, _, unit = text.removeprefix("<").partition("|")
        return cls(heading, unit, "<" if text.startswith("<") else ">")


class Finding(NamedTuple):
    """The rows of a study's table, whether the effect is as published or absent, and the values of its sentence.

    A row has one cell a column, None where there is no figure.
    """

    rows: Iterable[tuple[Cell, ...]]
    as_published: bool
    absent: bool
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return "did not hold" if self.absent else "held" if self.as_published else "other"


@dataclass(frozen=True)
class StudyResult:
    """A study's table, measured figures beside published ones, and its verdict on one GPU.

    Attributes:
        claim, source: the published sentence or figure, who measured it, on which GPU.
        rows: one cell a column: text, a number in the column's unit, or None where there is none.
        verdict: ``held``; ``did not hold``: the effect is absent; ``other``: it is there in another form or size, or
            the GPU refuses what the verdict rests on.
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

    ``headings`` are as ``Column.parse`` takes them, ``sentence`` is a template for the figures, ``rule`` says the
    verdict's thresholds. ``assess`` makes the table and the verdict from the timings of the listed points.
    """

    name: str
    title: str
    claim: str
    source: str
    headings: Sequence[str]
    sentence: str
    rule: str
    list_points: Callable[[], Iterable[Point]]
    assess: Assess

    def points(self) -> tuple[Point, ...]:
        return tuple(dict.fromkeys(self.list_points()))

    def judge(self, find: Find) -> StudyResult:
        """Make the table and the verdict from measurements alone; ``find`` returns None for a missing one.

        A ProfileError says if points were not measured, or a verdict by kernels lacks them.
        """
        readings = Readings.of(self.name, self.points(), find)
        try:
            finding, headings = self.assess(readings), self.headings
            sentence = f"{_OPENINGS[finding.verdict]} on this GPU: {self.sentence.format(**finding.values)}."
        except RefusedError as reason:
            refused = [(str(point), row.error) for point, row in readings.rows.items() if row.error is not None]
            finding, headings = Finding(refused, as_published=False, absent=False, values={}), ("<refused", "<reason")
            sentence = f"Cannot be told on this GPU, which refuses {reason}."
        columns, rows = tuple(map(Column.parse, headings)), tuple(finding.rows)
        notes = (self.rule, *finding.notes, *readings.refusals)
        return StudyResult(self.name, self.claim, self.source, columns, rows, finding.verdict, sentence, notes)


class Threshold(float):
    """A threshold, which the text of a rule writes as a factor, a share or an excess."""

    def __format__(self, style: str) -> str:
        if style == "times":
            return times(self)
        if style in ("percent", "more"):
            return percent(self - 1 if style == "more" else self)
        return super().__format__(style)


def study(name: str, list_points: Callable[[], Iterable[Point]]) -> Callable[[Assess], Study]:
    """Make a ``Study`` of the decorated function, which assesses readings by the thresholds of ``studies.toml``."""
    texts = dict(TEXTS[name])
    thresholds = {threshold: Threshold(value) for threshold, value in texts.pop("thresholds", {}).items()}
    texts["rule"] = texts["rule"].format(**thresholds)
    return lambda assess: Study(name=name, **texts, list_points=list_points, assess=partial(assess, **thresholds))


@dataclass(frozen=True)
class Band:
    """The published range of a figure, from ``least`` to ``most``; below ``absent`` there is no effect.

    ``write`` is ``times`` for factors and ``percent`` for shares.
    """

    least: float
    most: float
    absent: float
    write: Callable[..., str] = times

    def finding(self, figure: float, rows: Iterable[tuple[Cell, ...]], *notes: str, **values: Any) -> Finding:
        edges = (self.absent, self.least, self.most)
        as_published, absent = self.least <= figure <= self.most, figure < self.absent
        values["figure"] = self.write(figure, *edges)
        return Finding(rows, as_published, absent, values, (*notes, *close("", figure, *edges, write=self.write)))
