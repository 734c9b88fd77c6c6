"""A weight as it is."""

from gac.forms.base import Form, Place
from gac.models.sites import Weight


class Dense(Form):
    """The weight as it is."""

    name = "dense"
    symbol = "-"
    meaning = "dense, as it was"
    is_dense = True

    def params(self, weight: Weight, dim: int) -> int:
        return weight.params

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return ()
