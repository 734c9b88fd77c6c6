"""A weight as two factors."""

from functools import cached_property
from typing import ClassVar, Literal

from gac.core.operations import Operation, linear
from gac.forms.base import Form, Latency, LossMeasure, ModuleSpec, Place, Split
from gac.models.sites import Weight


def low_rank(m: int, k: int, r: int, n: int) -> Operation:
    return Operation("low_rank", (("m", m), ("k", k), ("r", r), ("n", n)))


class GemmPair(Latency):
    """Two GEMMs; on several GPUs the rank-r vectors between them are gathered, or summed, on every GPU."""

    form: "LowRank"

    def gemms(self, weight: Weight, dim: int, rows: int) -> tuple[Operation, ...]:
        weight = self.form.truncated(weight)
        return linear(rows, weight.in_features, dim), linear(rows, dim, weight.out_features)

    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        first, second = (gemm.axes for gemm in self.gemms(weight, dim, rows))
        return low_rank(rows, first["k"], dim, second["n"])

    def splits(self, weight: Weight) -> tuple[Split, ...]:
        return ("colwise_gather", "colwise") if weight.split == "out" else ("rowwise", "colwise_gather")

    def axis(self, weight: Weight) -> str:
        return "r"


class LowRank(Form):
    """W ~ B A with B ``(out, rank)`` and A ``(rank, in)``: two GEMMs."""

    name = "low_rank"
    symbol = "r"
    served = True
    meaning = "rank of a pair"
    loss = LossMeasure(in_every_calibration=True)
    rule_resource: ClassVar[Literal["params", "cached"] | None] = "params"

    @cached_property
    def latency(self) -> Latency:
        return GemmPair(self)

    def truncated(self, weight: Weight) -> Weight:
        return weight

    def full(self, weight: Weight) -> int:
        return super().full(self.truncated(weight))

    def params(self, weight: Weight, dim: int) -> int:
        weight = self.truncated(weight)
        return dim * (weight.out_features + weight.in_features)

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        weight = self.truncated(weight)
        sizes = {"in_features": weight.in_features, "rank": dim, "out_features": weight.out_features}
        return ModuleSpec("LowRankLinear", sizes)

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return Place("first.weight", 0, (dim,)), Place("second.weight", 1, (dim,))
