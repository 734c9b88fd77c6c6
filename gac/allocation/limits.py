"""What a choice may take of each cost column, as fractions of what the dense model takes, in exact integers."""

import math
from collections.abc import Sequence
from fractions import Fraction

from gac.allocation.candidates import CandidateSet
from gac.allocation.latencies import UNKNOWN
from gac.costs import BYTES, KV_NUMBERS, PARAMS
from gac.errors import ProfileError
from gac.recipe import Recipe

LOSS = "loss"
"""The limit of loss beside those of the cost columns, where something else is minimised."""


def floored(fraction: float, total: int) -> int:
    """``floor(fraction * total)`` in exact integers.

    The fraction counts as the decimal that it prints as: 0.8 is eight tenths, not the nearest double.

    >>> floored(0.8, 106168320), floored(0.29, 100), int(0.29 * 100)
    (84934656, 29, 28)
    """
    return math.floor(Fraction(repr(float(fraction))) * total)


def total(sets: Sequence[CandidateSet], column: str) -> int | None:
    """What one candidate a site costs together; None where that is unknown.

    Args:
        sets: of each site one candidate.
    """
    costs = [int(rows.cost(column)[0]) for rows in sets]
    return None if UNKNOWN in costs else sum(costs)


def dense_total(dense: Sequence[CandidateSet], column: str) -> int:
    """What the dense sites cost, of which a limit is a fraction.

    Raises:
        ProfileError: that is a latency that the profile does not hold.
    """
    if (found := total(dense, column)) is None:
        site = next(rows.site for rows in dense if rows.cost(column)[0] == UNKNOWN)
        raise ProfileError(
            f"the profile lacks the latency of {site} for {column.removeprefix('ns:')}",
            "measured latencies, since latency is limited",
            "Profile this model's shapes with gac profile, or plan without a latency limit.",
        )
    return found


def allowed(recipe: Recipe, dense: Sequence[CandidateSet]) -> dict[str, int]:
    """What each limited cost column may sum up to.

    Raises:
        ProfileError: a latency is limited, and the profile lacks it.
    """
    return {column: floored(fraction, dense_total(dense, column)) for column, fraction in recipe.fractions.items()}


def name_of(column: str) -> str:
    """What an error calls the limit of a cost column."""
    known = {
        PARAMS: "the parameter limit",
        BYTES: "the memory limit in bytes",
        KV_NUMBERS: "the KV-cache limit in numbers a token",
        LOSS: "the loss limit",
    }
    return known.get(column) or f"the latency limit in ns for {column.removeprefix('ns:')}"
