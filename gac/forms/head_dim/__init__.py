"""Attention with shorter value vectors."""

from gac.forms.base import LossMeasure, ModuleSpec, Shorter
from gac.models.sites import Side, Weight


class HeadDim(Shorter):
    """Attention with shorter value vectors, the same length in every head of a layer: v_proj and o_proj are smaller.

    So is the cache of values. Queries and keys keep their length, for rotary embeddings turn theirs. Attention kernels
    read rows of 16 bytes (FlashAttention and cuDNN take 16-bit head_dims that are multiples of 8), hence the step.
    """

    name = "head_dim"
    symbol = "d"
    meaning = "head_dim of the values"
    loss = LossMeasure(in_every_calibration=True)
    step = 8

    def shortens(self, weight: Weight) -> Side | None:
        return weight.values

    def copies(self, weight: Weight) -> int:
        return weight.heads

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        if weight.values == "in":
            return super().module(weight, dim)
        return ModuleSpec("ValueLinear", {"in_features": weight.in_features, "heads": weight.heads, "length": dim})
