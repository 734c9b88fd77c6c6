"""What GAC raises: one base class, and every error names its value, its expectation and its remedy."""

import re
from collections.abc import Iterable

UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move a terminal's cursor, turn the direction of text, or are no text at all."""

_LONGEST = 2000
_SHORT = 3  # of such a name, too many others have the first letters


class GacError(Exception):
    """A failure that the caller can mend.

    Args:
        given: what was given or found, with its value.
        expected: what would have been accepted.
        remedy: what to do next, as an imperative.

    Each is made safe to print: what a hostile file put into it is cut after 2000 characters, and control characters
    are escaped.
    """

    def __init__(self, given: str, expected: str, remedy: str) -> None:
        self.given, self.expected, self.remedy = map(printable, (given, expected, remedy))
        super().__init__(self.given, self.expected, self.remedy)

    def __str__(self) -> str:
        return f"{self.given}; expected {self.expected}. {self.remedy}"


def printable(text: str) -> str:
    """The text with its control characters escaped, and cut after 2000 characters; line breaks stay."""
    return escaped(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def escaped(text: str) -> str:
    """The text with its control characters escaped; line breaks stay."""
    return UNSAFE.sub(lambda found: found[0] if found[0] == "\n" else ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """The text as a name that a plan can hold: control characters and line breaks escaped."""
    return escaped(text).replace("\n", "\\n")


class BudgetError(GacError):
    """A budget or limit that is malformed or that no choice of candidates can meet."""


class ProfileError(GacError):
    """A latency table that cannot be read, or that belongs to other hardware."""


class ModelError(GacError):
    """A model that cannot be loaded, is of no supported family, or holds non-finite weights."""


class StatisticsError(GacError):
    """Kept statistics, curves or factors of a model that cannot be written or read."""


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
    """What a failure says, as far as it fits into a sentence of ours; its class where it says nothing."""
    return str(failure).strip().partition("\n")[0].rstrip(".") or type(failure).__name__


def did_you_mean(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The remedy for an unknown name: the nearest known one, or ``otherwise`` where none is as near as ``cutoff``.

    Capital letters count as small ones, and a name may be the beginning of a longer one. Several names in one, with
    commas between them, are to be given one by one.
    """
    from difflib import get_close_matches

    whole = {one.lower(): one for one in known}
    if "," in name and whole.keys() & {one.strip().lower() for one in name.split(",")}:
        return "Give each name by itself."
    begun = {one[: len(name)]: whole[one] for one in reversed(whole)} if len(name) > _SHORT else {}
    near = get_close_matches(name.lower(), [*whole, *begun], n=1, cutoff=cutoff)
    return f"Did you mean {(begun | whole)[near[0]]!r}?" if near else otherwise
