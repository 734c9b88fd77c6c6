"""Keys and values that the cache keeps as latents of groups of heads."""

import re
from functools import cached_property
from typing import ClassVar, Literal

from gac.core.errors import PlanError
from gac.core.operations import Operation, attend_latents, batched_gemm, linear
from gac.forms.base import Form, KVCache, Latency, LossMeasure, ModuleSpec, Place, Split, ends
from gac.forms.low_rank import low_rank
from gac.models.sites import Weight
from gac.runtime.limits import token_words

_PARAMETER = re.compile(r"(?P<group>[1-9][0-9]{0,5})(:int(?P<bits>[48]))?|int(?P<alone>[48])")
DEFAULT_GROUP = 4


def latent_name(group: int, bits: int | None = None) -> str:
    """As plans write the form.

    >>> latent_name(4), latent_name(1), latent_name(4, 8), latent_name(1, 4)
    ('latent', 'latent:1', 'latent:int8', 'latent:1:int4')
    """
    return ":".join(["latent", *([str(group)] if group != DEFAULT_GROUP else []), *([f"int{bits}"] if bits else [])])


class LatentGemms(Latency):
    """A GEMM for all A_g, and a batched GEMM for the B_g; a GPU multiplies whole groups out by itself."""

    form: "Latent"
    timed = False

    def gemms(self, weight: Weight, dim: int, rows: int) -> tuple[Operation, ...]:
        groups = self.form.groups(weight)
        first = linear(rows, weight.in_features, groups * dim)
        return first, batched_gemm(groups, rows, dim, weight.out_features // groups)

    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        pair = low_rank(rows, weight.in_features, dim, weight.out_features)
        return Operation("latent", (("b", self.form.groups(weight)), *pair.shape))

    def splits(self, weight: Weight) -> tuple[Split, ...]:
        return "colwise", "colwise"

    def axis(self, weight: Weight) -> str:
        return "r"


class LatentCache(KVCache):
    form: "Latent"

    def __init__(self, form: "Latent") -> None:
        super().__init__(form)
        self.bits = form.bits

    def numbers(self, weight: Weight, dim: int) -> int:
        groups = self.form.groups(weight)
        return groups * dim if self.bits is None else token_words(groups, dim, self.bits)

    def attention(self, weight: Weight, dim: int, texts: int, context: int) -> Operation:
        """With the assumed rank of the other weight's latents: one shape stands for all of these."""
        size, other = weight.out_features // weight.heads, self.assumed_partner_dim(weight)
        k, v = (other, dim) if weight.values else (dim, other)
        groups = self.form.groups(weight)
        return attend_latents(texts, weight.query_heads, weight.heads, context, size, groups, k, v, self.bits)

    def axis(self, weight: Weight) -> str:
        return "v" if weight.values else "k"

    def assumed_partner_dim(self, weight: Weight) -> int:
        """Half of the full rank, in steps."""
        step = 2 * self.form.step
        return max(step, self.form.full(weight) // (2 * step) * step)


class Latent(Form):
    """k_proj or v_proj as a low-rank pair for each group of heads, all of one rank (PaLU, arXiv 2407.21118).

    W's rows of one group are B_g A_g with B_g ``(rows of the group, rank)`` and A_g ``(rank, in)``. The A_g are one
    GEMM together, the B_g a batched GEMM. The outputs of the A_g, the latents, are what the KV cache keeps of a token:
    keys before norms and rotary embedding. Attention multiplies them out when it reads them, see
    ``gac.runtime.latents``. Its GEMMs are timed one by one, and attention over latents beside that over a dense cache.
    Rows of 16 bytes want ranks that are multiples of 8 in 16 bit. Where a group is one head, ``head_dim`` folds V's
    second factor into o_proj, and is the cheaper form.

    Args:
        group: heads in a group. A layer with no more heads than that is one group.
    """

    symbol = "g"
    meaning = "rank of a latent for each group of heads"
    loss = LossMeasure(uses_attention_curvature=True, anchors=(0.03, 0.1, 0.4))
    step = 8
    rule_resource: ClassVar[Literal["params", "cached"] | None] = "cached"
    bits: int | None = None

    def __init__(self, group: int = DEFAULT_GROUP) -> None:
        self.group = group
        self.name = latent_name(group, self.bits)

    @cached_property
    def latency(self) -> Latency:
        return LatentGemms(self)

    @cached_property
    def cache(self) -> KVCache:
        return LatentCache(self)

    def with_parameter(self, text: str) -> "Latent":
        """Groups of N heads, in a quantised cache where the text says so: ``N``, ``int8``, ``N:int8``, ``N:int4``."""
        match = _PARAMETER.fullmatch(text)
        if match is None:
            expected = "latent:N with a number of heads of 1 or more, latent:int8, latent:int4, latent:N:int8 or so"
            raise PlanError(f"form latent:{text}", expected, "Correct the name.")
        group, bits = int(match["group"] or DEFAULT_GROUP), match["bits"] or match["alone"]
        return Latent(group) if bits is None else RoundedLatent(group, int(bits))

    def applies_to(self, weight: Weight) -> bool:
        return weight.cached and weight.heads > 0

    def groups(self, weight: Weight) -> int:
        """Number of groups of the weight's heads; PlanError if the heads cannot be divided into such groups."""
        if weight.heads > self.group and weight.heads % self.group:
            divisors = [str(size) for size in range(1, weight.heads + 1) if weight.heads % size == 0]
            raise PlanError(
                f"groups of {self.group} of the {weight.heads} heads of {weight.name}",
                f"groups of {', '.join(divisors)} heads",
                "Give the number of heads after a colon: "
                f"{latent_name(int(divisors[-1]), self.bits)}, or the method palu:{divisors[-1]}.",
            )
        return max(1, weight.heads // self.group)

    def full(self, weight: Weight) -> int:
        return min(weight.out_features // self.groups(weight), weight.in_features)

    def params(self, weight: Weight, dim: int) -> int:
        return dim * (self.groups(weight) * weight.in_features + weight.out_features)

    def max_useful_dim(self, weight: Weight) -> int:
        """The largest dim with a smaller cache than the dense weight; its parameters may be more."""
        return self.full(weight) - 1

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        sizes = {"in_features": weight.in_features, "groups": self.groups(weight), "rank": dim}
        return ModuleSpec("LatentLinear", sizes | {"out_features": weight.out_features})

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return Place("first.weight", 0, ends(dim, self.groups(weight))), Place("second.weight", 2, (dim,))


class RoundedLatent(Latent):
    """The same pairs, whose latents are quantised to 8 or 4 bits between the factors, and cached so.

    Each token and group has a scale of 16 bits (``gac.runtime.latents.quantise``). The price of a rank is that of the
    plain latents, and of their quantisation (``gac.forms.latent.torch.rounding_cost``). The cache is counted in words
    of 16 bits, as exact as the numbers of other forms.

    Args:
        bits: of a number, 8 or 4.
    """

    meaning = "rank of a latent for each group of heads / bits of its numbers in the KV cache"
    loss = LossMeasure(uses_attention_curvature=True)
    rule_resource = None
    bits: int

    def __init__(self, group: int, bits: int) -> None:
        self.bits = bits
        super().__init__(group)

    @property
    def base_form(self) -> Latent:
        return Latent(self.group)

    def max_useful_dim(self, weight: Weight) -> int:
        return self.full(weight)

    def label(self, dim: int) -> str:
        return f"{super().label(dim)}/{self.bits}"

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        return ModuleSpec("RoundedLatentLinear", {**super().module(weight, dim).sizes, "bits": self.bits})
