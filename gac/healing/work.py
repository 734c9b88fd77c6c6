"""How much is trained, and how; and how much of it is done."""

import time
from dataclasses import dataclass
from math import sqrt

from gac.core.distributed.ranks import Ranks
from gac.core.errors import GacError

MINUTES = 5.0
"""What healing takes where nothing is said."""
MOST_MINUTES = 525_600
BLOCKS = 0.1
"""The part of the work that goes to decoder layers by themselves."""
RATE, AT = 2e-3, 1.35e8
"""The learning rate of a model of so many parameters; of others it falls with the fourth root of their number."""


@dataclass(frozen=True)
class Work:
    """What is asked of a healing.

    Attributes:
        minutes: of wall-clock time, everything counted; None where ``tokens`` are given.
        tokens: that are read in training; None where ``minutes`` are given.
        learning_rate: of full steps, and relative: a step moves the entries of a weight by about this part of their
            root mean square (Adafactor, arXiv 1804.04235, section 8), so that one rate suits factors, norms and
            scales alike.
        blocks: the part that goes to decoder layers by themselves, from 0 to 1.
        dense: whether weights that the plan leaves dense are trained too.
        labels: the part of the loss that is the text's own next tokens at the end, from 0 up to below 1.
        seed: of the order of the text.
    """

    minutes: float | None
    tokens: int | None
    learning_rate: float
    blocks: float
    dense: bool
    labels: float
    seed: int

    @classmethod
    def of(
        cls,
        minutes: float | None,
        tokens: int | None,
        learning_rate: float | None,
        blocks: float,
        dense: bool,
        labels: float,
        seed: int,
        params: int,
    ) -> "Work":
        """As asked, with what is left open decided.

        Args:
            params: of the dense model.

        Raises:
            GacError: both minutes and tokens are given, or a number is out of range.
        """
        if minutes is not None and tokens is not None:
            raise GacError(f"minutes={minutes:g} and tokens={tokens:,}", "one of the two", "Leave one out.")
        minutes = MINUTES if minutes is None and tokens is None else minutes
        if minutes is not None and not 0 < minutes <= MOST_MINUTES:
            raise GacError(f"minutes={minutes:g}", f"minutes above 0, up to {MOST_MINUTES:,}, a year", "Try 5.")
        if learning_rate is not None and not 0 < learning_rate < 1:
            given = f"learning_rate={learning_rate:g}"
            raise GacError(given, "a part of the weights' size, above 0 and below 1", f"Try {RATE:g}, or leave it out.")
        if not 0 <= blocks <= 1:
            given = f"blocks={blocks:g}"
            raise GacError(given, "the part of the work that goes to single layers, from 0 to 1", f"Try {BLOCKS:g}.")
        if not 0 <= labels < 1:
            given = f"labels={labels:g}"
            raise GacError(
                given, "the part of the loss that is the text's own tokens, from 0 up to below 1", "Try 0.5."
            )
        if labels and blocks == 1:
            given, due = f"labels={labels:g} with blocks=1", "steps of the whole model, which labels are for"
            raise GacError(given, due, "Ask for a smaller part for single layers, or leave the labels out.")
        if not 0 <= seed < 2**32:
            raise GacError(f"seed={seed}", "a seed from 0 up to below 2 ** 32", "Try 0.")
        return cls(minutes, tokens, learning_rate or rate_for(params), blocks, dense, labels, seed)


def rate_for(params: int) -> float:
    """The learning rate of a model of so many parameters, where none is asked for."""
    return float(f"{RATE * (AT / max(params, AT)) ** 0.25:.2g}")


def rate_of_steps(rate: float, tokens: int, due: int) -> float:
    """The learning rate of steps of so many tokens, where it is meant for steps of ``due``.

    Smaller ones take the root of their share of it: the square root scaling rule (arXiv 2205.10287).
    """
    return rate * sqrt(min(1.0, tokens / due))


class Span:
    """A part of the work: so many tokens, or so many seconds from now on.

    Args:
        seconds: None where tokens are counted, and then the same is done every time.
        tokens: None where time is.
        spent: seconds, or tokens, that an interrupted run has had of it.
    """

    def __init__(self, ranks: Ranks, seconds: float | None, tokens: int | None, spent: float = 0.0) -> None:
        self._ranks, self._seconds, self._tokens = ranks, seconds, tokens
        self._read = int(spent) if tokens is not None else 0
        self._begun = time.monotonic() - (spent if tokens is None else 0.0)

    def read(self, tokens: int) -> None:
        """So many tokens more are done."""
        self._read += tokens

    @property
    def spent(self) -> float:
        """Tokens, or seconds."""
        return float(self._read) if self._tokens is not None else time.monotonic() - self._begun

    def progress(self) -> float:
        """The part that is done, from 0 to 1, the same in every process."""
        if self._tokens is not None:
            return min(1.0, self._read / self._tokens) if self._tokens else 1.0
        whole = self._seconds or 0.0
        return self._ranks.once(lambda: min(1.0, self.spent / whole) if whole > 0 else 1.0)
