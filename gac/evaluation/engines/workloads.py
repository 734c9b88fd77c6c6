"""Runs of an engine: a prefill, decode steps, and many requests at once. Loads no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from gac.core.errors import GacError
from gac.core.workloads import Workload

DECODE_STEPS = 64
"""Steps that a decode run is averaged over."""

MOST_SEQUENCES = 4096
_THROUGHPUT = re.compile(r"(throughput):([0-9]{1,9})x([0-9]{1,9})")


@dataclass(frozen=True)
class EngineWorkload:
    """``prefill:BxS``, ``decode:B@C``, or ``throughput:RxS``.

    The last are R requests at once, with prompts of S/8 to S tokens and answers of S/16 to S/4 (drawn with seed 0).
    """

    phase: Literal["prefill", "decode", "throughput"]
    sequences: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "EngineWorkload":
        """Read a workload; a GacError if it is none, or has more than ``MOST_SEQUENCES``."""
        match = _THROUGHPUT.fullmatch(text)
        if match and int(match[2]) and int(match[3]):
            workload = cls("throughput", int(match[2]), int(match[3]))
        else:
            try:
                step = Workload.parse(text)
            except GacError as failure:
                expected = "prefill:BxS, decode:B@C or throughput:RxS with positive integers"
                raise GacError(
                    failure.given, expected, "Write it like decode:16@1024 or throughput:256x1024."
                ) from None
            workload = cls(step.phase, step.batch, step.tokens)
        if workload.sequences > MOST_SEQUENCES:
            problem = f"workload {text!r} of {workload.sequences:,} sequences"
            raise GacError(problem, f"at most {MOST_SEQUENCES:,}", "Name a smaller one.")
        return workload

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """Tokens of the prompt and of the answer, one pair a sequence."""
        if self.phase != "throughput":
            return [(self.tokens, 1 if self.phase == "prefill" else DECODE_STEPS + 1)] * self.sequences
        draw, size = Random(0), self.tokens
        bounds = (max(1, size // 8), size), (max(1, size // 16), max(1, size // 4))
        return [(draw.randint(*bounds[0]), draw.randint(*bounds[1])) for _ in range(self.sequences)]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, with its answer."""
        return max(prompt + answer for prompt, answer in self.lengths)

    @property
    def cached_tokens(self) -> int:
        """Tokens that the KV cache has to hold at once, so that no sequence waits for another.

        Requests of a throughput may wait.
        """
        return self.longest * (1 if self.phase == "throughput" else self.sequences)

    @property
    def processed_tokens(self) -> int:
        """Tokens of one run, prompts and answers; a decode run reads its prompts twice."""
        total = sum(prompt + answer for prompt, answer in self.lengths)
        return total + (self.sequences * (self.tokens + 1) if self.phase == "decode" else 0)

    def tokens_per_second(self, ms: float) -> tuple[float, float | None]:
        """Convert the time of a run: tokens read (prefill) or written a second; of a throughput also both together."""
        if self.phase != "throughput":
            return 1e3 * self.sequences * (self.tokens if self.phase == "prefill" else 1) / ms, None
        written, total = sum(answer for _, answer in self.lengths), sum(map(sum, self.lengths))
        return 1e3 * written / ms, 1e3 * total / ms

    def __str__(self) -> str:
        return f"{self.phase}:{self.sequences}{'@' if self.phase == 'decode' else 'x'}{self.tokens}"


def default_workloads(tokens: int) -> tuple[EngineWorkload, ...]:
    """Prefill of 1 and 8 prompts, decode of 1, 16 and 64 sequences after them, and 256 requests at once."""
    return (
        *(EngineWorkload("prefill", batch, tokens) for batch in (1, 8)),
        *(EngineWorkload("decode", batch, tokens) for batch in (1, 16, 64)),
        EngineWorkload("throughput", 256, tokens),
    )
