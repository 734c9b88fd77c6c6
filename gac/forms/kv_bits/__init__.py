"""Keys and values that the cache keeps in few bits."""

from functools import cached_property

from gac.core.operations import Operation
from gac.forms.base import Form, KVCache, LossMeasure, ModuleSpec, Place
from gac.models.sites import Weight
from gac.runtime.limits import BLOCK, EXACT, MOST_BITS, block_words

LEAST, MOST = 2, MOST_BITS
"""Bits of a number."""


class RoundedCache(KVCache):
    bits = MOST
    exact_tokens = EXACT + BLOCK

    def numbers(self, weight: Weight, dim: int) -> int:
        """Of a block of tokens, for each of them, rounded up; scales too."""
        return -(-block_words(weight.out_features, dim, keys=not weight.name.endswith("v_proj")) // BLOCK)

    def bits_at(self, dim: int) -> int:
        return dim

    def attention(self, weight: Weight, dim: int, texts: int, context: int) -> Operation:
        """An operation that no table has: no kernel reads such a cache."""
        axes = {"b": texts, "h": weight.query_heads, "kv": weight.heads, "t": context, "bits": dim}
        return Operation("rounded_attention", tuple(axes.items()))

    def axis(self, weight: Weight) -> str:
        return "bits"


class KVBits(Form):
    """k_proj or v_proj as it is, whose outputs the cache keeps in so many bits a number (KIVI, arXiv 2402.02750).

    Keys are rounded channel by channel over blocks of tokens, as they are attended to; values token by token. The last
    tokens stay as they are (``gac.runtime.latents.rounded``), and are not counted: they do not grow with the text.
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
        return MOST

    def label(self, dim: int) -> str:
        return f"kv{dim}"

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        sizes = {"in_features": weight.in_features, "out_features": weight.out_features, "bits": dim}
        return ModuleSpec("RoundedLinear", sizes)

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return ()
