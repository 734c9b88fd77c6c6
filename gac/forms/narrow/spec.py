"""An MLP with fewer neurons."""

from typing import Literal

from gac.forms.base import Shorter
from gac.models.weights import Weight


class Narrow(Shorter):
    """The MLP with fewer neurons."""

    name = "narrow"

    def shortens(self, weight: Weight) -> Literal["out", "in"] | None:
        return weight.neurons

    def size(self, weight: Weight, dim: int) -> int:
        return weight.blocks * dim
