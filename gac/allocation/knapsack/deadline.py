"""How long a search may go on."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """A moment of the monotonic clock, in seconds."""

    at: float

    @staticmethod
    def after(seconds: float) -> "Deadline":
        return Deadline(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until then; negative once it has passed."""
        return self.at - time.monotonic()

    @property
    def passed(self) -> bool:
        return self.left <= 0
