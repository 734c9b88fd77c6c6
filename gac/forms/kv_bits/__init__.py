"""Keys and values that the cache keeps in few bits."""

from functools import cached_property

from gac.core.operations import Operation
from gac.forms.base import Form, KVCache, LossMeasure, ModuleSpec, Place
from gac.models.sites import Weight
from gac.runtime.limits import group_words

LEAST, MOST = 2, 8
"""Bits of a number."""


class RoundedCache(KVCache):
    """Numbers of a token lie one after the other, and fill whole words of 16 bits."""

    bits = MOST

    def numbers(self, weight: Weight, dim: int) -> int:
        return group_words(weight.out_features, dim)

    def bits_at(self, dim: int) -> int:
        return dim

    def attention(self, weight: Weight, dim: int, texts: int, context: int) -> Operation:
        """An operation that no table has: no kernel reads such a cache."""
        axes = {"b": texts, "h": weight.query_heads, "kv": weight.heads, "t": context, "bits": dim}
        return Operation("rounded_attention", tuple(axes.items()))

    def axis(self, weight: Weight) -> str:
        return "bits"


class KVBits(Form):
    """k_proj or v_proj as it is, whose outputs are rounded to so many bits a number, and cached so.

    Each channel has a grid of its own, ``offset + step * n`` with n from 0 to ``2 ** bits - 1``, which text has shown to
    lose least. Keys are rounded before norms and rotary embedding, where channels differ most from each other (KVQuant,
    arXiv 2401.18079; KIVI, arXiv 2402.02750). Rounding is part of the model, with a cache and without.
    """

    name = "kv_bits"
    symbol = "b"
    meaning = "bits of a cached number"
    min_dim = LEAST
    dim_counts_units = True
    loss = LossMeasure(needs_forward_runs=True, anchors=(0.003, 0.03, 0.3))

    @cached_property
    def cache(self) -> KVCache:
        return RoundedCache(self)

    def applies_to(self, weight: Weight) -> bool:
        return weight.cached and weight.heads > 0 and not weight.as_values

    def full(self, weight: Weight) -> int:
        return MOST

    def size(self, weight: Weight, dim: int) -> int:
        return weight.out_features

    def params(self, weight: Weight, dim: int) -> int:
        return weight.params

    def max_useful_dim(self, weight: Weight) -> int:
        """Every dim has a smaller cache than the dense weight, and as many parameters."""
        return self.full(weight)

    def label(self, dim: int) -> str:
        return f"kv{dim}"

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        sizes = {"in_features": weight.in_features, "out_features": weight.out_features, "bits": dim}
        return ModuleSpec("RoundedLinear", sizes)

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return ()
