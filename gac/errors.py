"""What GAC raises: one base class, and every error names its value, its expectation and its remedy."""

from collections.abc import Iterable


class GacError(Exception):
    """A failure that the caller can mend.

    Args:
        given: what was given or found, with its value.
        expected: what would have been accepted.
        remedy: what to do next, as an imperative.
    """

    def __init__(self, given: str, expected: str, remedy: str) -> None:
        super().__init__(given, expected, remedy)
        self.given = given
        self.expected = expected
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.given}; expected {self.expected}. {self.remedy}"


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


class CheckpointError(GacError):
    """A checkpoint directory that cannot be written or read."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The remedy for an unknown name: the nearest known one, or ``otherwise`` where none is as near as ``cutoff``."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"Did you mean {near[0]!r}?" if near else otherwise
