"""A weight as it is."""

from gac.forms.base import Form, ModuleSpec, Place
from gac.models.sites import Weight


class Dense(Form):
    """The weight as it is."""

    name = "dense"
    symbol = "-"
    meaning = "dense, as it was"
    is_dense = True

    def full(self, weight: Weight) -> int:
        return min(weight.out_features, weight.in_features)

    def params(self, weight: Weight, dim: int) -> int:
        return weight.params

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        return ModuleSpec("Linear", {"in_features": weight.in_features, "out_features": weight.out_features})

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return ()
