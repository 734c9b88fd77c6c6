"""From a factor to a verdict, and the line that says it."""

from gac.profiling.studies.records import Verdict

ABSENT = 1.05
"""A slowdown below this is no effect."""

_OPENINGS: dict[Verdict, str] = {
    "held": "Holds on this GPU",
    "did not hold": "Does not hold on this GPU",
    "other": "Differs on this GPU",
}


def graded(factor: float, least: float, most: float) -> Verdict:
    """``held`` inside the published band, ``did not hold`` where there is no effect, ``other`` in between or beyond."""
    if factor < ABSENT:
        return "did not hold"
    return "held" if least <= factor <= most else "other"


def band_rule(what: str, least: float, most: float) -> str:
    """The rule that ``graded`` follows, in words."""
    return (
        f"rule: {what}; held from {least:.2f}x to {most:.2f}x, did not hold below {ABSENT:.2f}x, "
        "other where it is smaller or larger than published"
    )


def percent(share: float) -> str:
    """A share in words: ``58 %``; never ``-0 %``."""
    return f"{round(100 * share)} %"


def stated(verdict: Verdict, figures: str) -> str:
    """The study's one line."""
    return f"{_OPENINGS[verdict]}: {figures}."
