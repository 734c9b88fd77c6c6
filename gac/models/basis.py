"""The record of a rotation in plans; ``gac.models.rotation`` does it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rotation:
    """The rotated parts of a model: the values of heads, and the residual stream."""

    stream: bool  # the residual stream is rotated
    untied: int  # parameters of the head where it was tied to the embedding and is now a weight of its own; else 0

    def __str__(self) -> str:
        """``residual stream and values of heads; the head is no longer tied: 28,311,552 parameters more``."""
        parts = "residual stream and values of heads" if self.stream else "values of heads alone"
        more = f"; the head is no longer tied: {self.untied:,} parameters more" if self.untied else ""
        return f"{parts}{more}"
