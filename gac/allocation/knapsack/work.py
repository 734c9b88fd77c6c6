"""How much work a search has done and may do. It is counted: by a clock, slow machines would choose otherwise."""

from dataclasses import dataclass

STEPS = 1 << 21
"""Steps of a unit of work, which takes a core about a second."""


@dataclass
class Work:
    """Units of work that may be done, and the steps done: costs and pairs of partial choices that are looked at.

    CP-SAT counts its own work, in units of about a second.
    """

    limit: float
    steps: int = 0

    @property
    def left(self) -> float:
        """Units not done yet; 0 or less where the limit is reached."""
        return self.limit - self.steps / STEPS

    @property
    def spent(self) -> bool:
        return self.left <= 0

    def __str__(self) -> str:
        return f"{self.steps / STEPS:.3g} of {self.limit:g} units of work"
