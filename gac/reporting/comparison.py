"""Two models' perplexity on the same tokens, beside what a plan predicted."""

from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gac.evaluation.perplexity import Perplexity


@dataclass(frozen=True)
class Measured:
    """One model's name and perplexity."""

    name: str
    perplexity: "Perplexity"


@dataclass(frozen=True)
class Comparison:
    """A model, and where there is one the model it is compared with.

    Attributes:
        predicted: what the model's plan promised for ln(perplexity / that of ``against``); None without a plan.
    """

    model: Measured
    against: Measured | None = None
    predicted: float | None = None

    @property
    def ratio(self) -> float | None:
        """Perplexity over that of ``against``."""
        return None if self.against is None else self.model.perplexity.value / self.against.perplexity.value

    @property
    def log_ratio(self) -> float | None:
        """What is lost, nats a token."""
        return None if self.ratio is None else log(self.ratio)

    @property
    def predicted_perplexity(self) -> float | None:
        """The prediction on this text: the other model's perplexity here, times exp of the predicted loss."""
        if self.against is None or self.predicted is None:
            return None
        return self.against.perplexity.value * exp(self.predicted)
