"""A weight as two factors."""

from typing import ClassVar, Literal

from gac.core.operations import Operation, linear
from gac.forms.base import Form, ModuleSpec, Place, Split
from gac.models.sites import Weight


def low_rank(m: int, k: int, r: int, n: int) -> Operation:
    """A pair of GEMMs ``x[m, k] -> r -> n``."""
    return Operation("low_rank", (("m", m), ("k", k), ("r", r), ("n", n)))


class LowRank(Form):
    """W ~ B A with B ``(out, rank)`` and A ``(rank, in)``: two GEMMs."""

    name = "low_rank"
    symbol = "r"
    meaning = "rank of a pair"
    tensor_form = "gac.forms.low_rank.torch:LowRankTensors"
    standard = True
    counts: ClassVar[Literal["params", "cached"] | None] = "params"

    def full(self, weight: Weight) -> int:
        return min(weight.out_features, weight.in_features)

    def params(self, weight: Weight, dim: int) -> int:
        return dim * (weight.out_features + weight.in_features)

    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        return low_rank(rows, weight.in_features, dim, weight.out_features)

    def splits(self, weight: Weight) -> tuple[Split, ...]:
        """Both factors are divided; the rank-r vectors between them are gathered, or summed, on every GPU."""
        return ("colwise_gather", "colwise") if weight.split == "out" else ("rowwise", "colwise_gather")

    def axis(self, weight: Weight) -> str:
        return "r"

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        sizes = {"in_features": weight.in_features, "rank": dim, "out_features": weight.out_features}
        return ModuleSpec("LowRankLinear", sizes)

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return Place("first.weight", 0, (dim,)), Place("second.weight", 1, (dim,))

    def fused(self, weight: Weight, dim: int) -> int:
        return dim

    def after(self, weight: Weight, dim: int, rows: int) -> Operation:
        return linear(rows, dim, weight.out_features)
