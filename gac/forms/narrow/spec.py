"""An MLP with fewer neurons."""

from gac.forms.base import Shorter
from gac.models.sites import Side, Weight


class Narrow(Shorter):
    """The MLP with fewer neurons."""

    name = "narrow"
    symbol = "w"
    meaning = "neurons that an MLP keeps"
    tensor_form = "gac.forms.narrow.torch:NarrowTensors"
    standard = True

    def shortens(self, weight: Weight) -> Side | None:
        return weight.neurons

    def copies(self, weight: Weight) -> int:
        return weight.blocks
