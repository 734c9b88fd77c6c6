"""Attention with shorter value vectors."""

from typing import Literal

from gac.forms.base import Shorter
from gac.models.weights import Weight


class HeadDim(Shorter):
    """Attention with shorter value vectors, the same length in every head of a layer: v_proj and o_proj are smaller.

    So is the cache of values. Queries and keys keep their length, for rotary embeddings turn theirs. Attention kernels
    read rows of 16 bytes (FlashAttention and cuDNN take 16-bit head_dims that are multiples of 8), hence the step.
    """

    name = "head_dim"
    step = 8

    def shortens(self, weight: Weight) -> Literal["out", "in"] | None:
        return weight.values

    def size(self, weight: Weight, dim: int) -> int:
        return weight.heads * dim
