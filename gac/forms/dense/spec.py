"""A weight as it is."""

from gac.core.operations import Operation, linear
from gac.forms.base import Form, ModuleSpec, Place
from gac.models.sites import Weight


class Dense(Form):
    """The weight as it is."""

    name = "dense"
    symbol = "-"
    meaning = "dense, as it was"
    tensor_form = "gac.forms.dense.torch:DenseTensors"

    def full(self, weight: Weight) -> int:
        return min(weight.out_features, weight.in_features)

    def params(self, weight: Weight, dim: int) -> int:
        return weight.params

    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        return linear(rows, weight.in_features, weight.out_features)

    def axis(self, weight: Weight) -> None:
        return None

    def fused(self, weight: Weight, dim: int) -> int:
        return weight.out_features

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        return ModuleSpec("Linear", {"in_features": weight.in_features, "out_features": weight.out_features})

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return ()
