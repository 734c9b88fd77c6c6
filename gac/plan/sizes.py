"""Sizes of a whole model as a user writes them: ``6GB`` of memory, ``6B`` parameters."""

import re
from collections.abc import Mapping
from fractions import Fraction

from gac.core.errors import BudgetError
from gac.plan.costs import BYTES, COSTS, PARAMS

_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?([A-Za-z]+)")
_UNITS: Mapping[str, Mapping[str, int]] = {
    PARAMS: {"M": 10**6, "B": 10**9},
    BYTES: {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}
_EXAMPLES = {PARAMS: "6B or 6000M parameters", BYTES: "6GB, 600MB or 5.5GiB"}

SIZED = tuple(_UNITS)
"""The costs that a size of the whole model can limit."""


def size_of(column: str, text: str) -> int:
    """Parameters or bytes in a size, rounded down.

    >>> size_of("bytes", "1.5GiB"), size_of("params", "6B")
    (1610612736, 6000000000)

    Raises:
        BudgetError: the text is no number above 0 with a unit of this cost.
    """
    match, units = _SIZE.fullmatch(text.strip()), {unit.lower(): size for unit, size in _UNITS[column].items()}
    size = int(Fraction(match[1]) * units.get(match[2].lower(), 0)) if match else 0
    if not size:
        expected = f"a number above 0 and at most 1, or a size of the whole model in {' or '.join(_UNITS[column])}"
        remedy = f"Give a fraction such as 0.8, or {_EXAMPLES[column]}."
        raise BudgetError(f"limits.{COSTS[column].limit}={text!r}", expected, remedy)
    return size


def size_text(column: str, amount: int) -> str:
    """A size of at least this amount, in whole millions: ``412MB``, ``113M``."""
    return f"{-(-amount // 10**6)}{'MB' if column == BYTES else 'M'}"
