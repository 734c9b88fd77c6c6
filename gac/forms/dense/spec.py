"""A weight as it is."""

from gac.forms.base import Form
from gac.models.weights import Weight
from gac.operations import Operation, linear


class Dense(Form):
    """The weight as it is."""

    name = "dense"

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

    def after(self, weight: Weight, dim: int, rows: int) -> None:
        return None
