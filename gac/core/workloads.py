"""Workloads: batches of tokens that a model runs."""

import re
from dataclasses import dataclass
from typing import Literal

from gac.core.errors import GacError

_WORKLOAD = re.compile(r"(prefill):([0-9]{1,9})x([0-9]{1,9})|(decode):([0-9]{1,9})@([0-9]{1,9})")


@dataclass(frozen=True)
class Workload:
    """``prefill:BxS`` (batch B of S tokens) or ``decode:B@C`` (batch B, C tokens of context)."""

    phase: Literal["prefill", "decode"]
    batch: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """Read ``prefill:1x1024`` or ``decode:1@1024``."""
        match = _WORKLOAD.fullmatch(text)
        numbers = [int(part) for part in match.groups() if part and part.isdigit()] if match else []
        if not match or 0 in numbers:
            expected, remedy = "prefill:BxS or decode:B@C with positive integers", "prefill:1x1024 or decode:1@1024"
            raise GacError(f"workload {text!r}", expected, f"Write it like {remedy}.")
        return cls("prefill" if match[1] else "decode", *numbers)

    @property
    def rows(self) -> int:
        """Rows of every linear layer's input: tokens of one step."""
        return self.batch * self.tokens if self.phase == "prefill" else self.batch

    def tokens_per_second(self, step_ns: int) -> float:
        """Return the tokens that steps of so many nanoseconds read (prefill) or write (decode) a second."""
        return self.rows * 1e9 / step_ns

    def __str__(self) -> str:
        sign = "x" if self.phase == "prefill" else "@"
        return f"{self.phase}:{self.batch}{sign}{self.tokens}"
