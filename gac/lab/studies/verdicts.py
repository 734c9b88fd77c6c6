"""From a factor to a verdict, its sentence, and its distance from the verdict's thresholds."""

from collections.abc import Callable

from gac.lab.studies.records import Verdict

ABSENT = 1.05
"""A slowdown below this is no effect."""

NOISE = 0.03
"""Two latencies that differ by less than this are the same."""

CLOSE = 0.05
"""A figure this near to its threshold, as a share of it, may fall on the other side when it is measured again."""

_OPENINGS: dict[Verdict, str] = {
    "held": "Holds on this GPU",
    "did not hold": "Does not hold on this GPU",
    "other": "Differs on this GPU",
}


def graded(figure: float, least: float, most: float, absent: float = ABSENT) -> Verdict:
    """``held`` inside the published band, ``did not hold`` where there is no effect, ``other`` in between or beyond."""
    if figure < absent:
        return "did not hold"
    return "held" if least <= figure <= most else "other"


def band_rule(what: str, least: float, most: float) -> str:
    """The rule that ``graded`` follows, in words."""
    return (
        f"rule: {what}; held from {least:.2f}x to {most:.2f}x, did not hold below {ABSENT:.2f}x, "
        "other where it is smaller or larger than published"
    )


def times(factor: float, *edges: float) -> str:
    """A factor in words, ``2.42x``, with enough digits to differ from every edge that it differs from."""
    return _apart(factor, edges, lambda value, digits: f"{value:.{2 + digits}f}x")


def percent(share: float, *edges: float) -> str:
    """A share in words, ``58 %``, with enough digits to differ from every edge; never ``-0 %``."""
    return _apart(share, edges, lambda value, digits: f"{round(100 * value, digits) + 0.0:.{digits}f} %")


def _apart(value: float, edges: tuple[float, ...], write: Callable[[float, int], str]) -> str:
    """The shortest text, by at most four more digits, that is not also the text of another figure among the edges."""
    others = [edge for edge in edges if edge != value]
    texts = (write(value, digits) for digits in range(4) if all(_differ(value, edge, digits, write) for edge in others))
    return next(texts, write(value, 4))


def _differ(value: float, edge: float, digits: int, write: Callable[[float, int], str]) -> bool:
    return write(value, digits) != write(edge, digits)


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


def stated(verdict: Verdict, figures: str) -> str:
    """The study's one line."""
    return f"{_OPENINGS[verdict]}: {figures}."
