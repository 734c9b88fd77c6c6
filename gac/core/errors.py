"""Errors of GAC: one base class; every error names the value, the expectation and the remedy."""

import re
from collections.abc import Iterable

UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, changes of the direction of text, and surrogates."""

_LONGEST = 2000
_SHORT = 3  # too many names begin with so few letters


class GacError(Exception):
    """An error that the caller can fix: the value that was given, the accepted values, and the next step.

    Each is made safe to print: it is cut after 2000 characters, and control characters are escaped.
    """

    def __init__(self, given: str, expected: str, remedy: str) -> None:
        self.given, self.expected, self.remedy = map(printable, (given, expected, remedy))
        super().__init__(self.given, self.expected, self.remedy)

    def __str__(self) -> str:
        return f"{self.given}; expected {self.expected}. {self.remedy}"


def printable(text: str) -> str:
    """Escape control characters, and cut the text after 2000 characters; line breaks stay."""
    return escaped(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def escaped(text: str) -> str:
    return UNSAFE.sub(lambda match: match[0] if match[0] == "\n" else ascii(match[0])[1:-1], text)


def one_line(text: str) -> str:
    """Escape control characters and line breaks, for names in plans."""
    return escaped(text).replace("\n", "\\n")


class BudgetError(GacError):
    """A budget or limit that is malformed or that no choice of candidates can meet."""


class ProfileError(GacError):
    """A latency table that cannot be read, or that belongs to other hardware."""


class ModelError(GacError):
    """A model that cannot be loaded, is of no supported family, or holds non-finite weights."""


class StatisticsError(GacError):
    """Stored statistics, curves or factors of a model that cannot be written or read."""


class TextError(GacError):
    """Calibration or evaluation text that is missing, too short, or of an unknown name."""


class TaskError(GacError):
    """A task to score models on that is unknown, malformed, or whose data cannot be had."""


class PlanError(GacError):
    """A plan that cannot be read, or that was made for another model."""


class HealingError(GacError):
    """Healing that lowers no loss, or whose loss does not stay finite."""


class CheckpointError(GacError):
    """A checkpoint directory that cannot be written or read."""


def first_line(failure: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its class."""
    return str(failure).strip().partition("\n")[0].rstrip(".") or type(failure).__name__


def did_you_mean(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """Return the remedy for an unknown name: the nearest known one, or ``otherwise`` where none is near enough.

    Case is ignored, and a name may be the beginning of a longer one. Names joined by commas are to be given one by one.
    """
    from difflib import get_close_matches

    names = {other.lower(): other for other in known}
    if "," in name and names.keys() & {part.strip().lower() for part in name.split(",")}:
        return "Give each name by itself."
    prefixes = {other[: len(name)]: names[other] for other in reversed(names)} if len(name) > _SHORT else {}
    near = get_close_matches(name.lower(), [*names, *prefixes], n=1, cutoff=cutoff)
    return f"Did you mean {(prefixes | names)[near[0]]!r}?" if near else otherwise
