"""An attention or an MLP that is left out."""

from gac.forms.base import LossMeasure, ModuleSpec, Place, Shorter
from gac.models.sites import Side, Weight


class Skip(Shorter):
    """An attention or an MLP at dim 0 does nothing, or adds a constant to the residual stream; dim 1 is the dense one.

    Nothing is multiplied, and nothing is cached. The constant is what the block wrote on average, or what a refit makes
    of it; where a norm stands before the residual stream, which would make it as large as any output, there is none.
    The first layer stays, and of each kind of attention the first one: transformers asks its cache how long the text
    is. So do MLPs that are no module of their own, and blocks that do more than to write to the residual stream.
    """

    name = "skip"
    symbol = "s"
    served = True
    meaning = "0: an attention or MLP that is skipped"
    loss = LossMeasure(needs_forward_runs=True)
    min_dim = 0
    dim_counts_units = True
    removes = ("attentions", "MLPs")

    def shortens(self, weight: Weight) -> Side | None:
        return weight.block

    def full(self, weight: Weight) -> int:
        return 1

    def size(self, weight: Weight, dim: int) -> int:
        return dim * super().full(weight)

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        sizes = {"in_features": weight.in_features, "out_features": weight.out_features}
        nothing = "Constant" if self.adds(weight) else "Absent"
        return ModuleSpec("Linear" if dim else nothing, sizes)

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return ()

    def adds(self, weight: Weight) -> bool:
        """True if a constant replaces the weight's output."""
        return weight.block == "in" and not weight.normed
