"""Fewer routed experts in a layer."""

from gac.forms.base import LossMeasure, ModuleSpec, Place, Shorter
from gac.models.sites import Side, Weight


class Experts(Shorter):
    """A mixture of experts keeps some of the experts of a layer, and the rows of its router that choose them.

    A token takes as many as before: where one of its experts is gone, the router takes the next one, and weighs them as
    the model does. At most as many can go as leave each token that number.
    """

    name = "experts"
    symbol = "e"
    meaning = "experts that a layer keeps"
    loss = LossMeasure(uses_routed_tokens=True)
    served = True
    dim_counts_units = True

    def shortens(self, weight: Weight) -> Side | None:
        if not weight.is_routed:
            return None
        return "in" if weight.experts else "out"

    def full(self, weight: Weight) -> int:
        return weight.experts or weight.out_features

    def least(self, weight: Weight) -> int:
        return weight.top_k

    def sides(self, weight: Weight, dim: int) -> tuple[int, int]:
        return weight.in_features, dim * (weight.out_features if weight.experts else 1)

    def size(self, weight: Weight, dim: int) -> int:
        return dim * weight.in_features  # whole matrices, whose sides stay aligned

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        if not weight.experts:
            return ModuleSpec("Router", {"experts": dim})
        return ModuleSpec("Experts", {"experts": dim, "width": weight.out_features // weight.blocks})

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return ()
