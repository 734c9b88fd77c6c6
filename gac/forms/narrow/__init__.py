"""An MLP with fewer neurons."""

from gac.forms.base import LossMeasure, Shorter
from gac.models.sites import Side, Weight


class Narrow(Shorter):
    """The MLP with fewer neurons."""

    name = "narrow"
    symbol = "w"
    served = True
    meaning = "neurons that an MLP keeps"
    loss = LossMeasure(in_every_calibration=True)
    removes = ("neurons",)

    def shortens(self, weight: Weight) -> Side | None:
        return weight.neurons

    def copies(self, weight: Weight) -> int:
        return weight.blocks
