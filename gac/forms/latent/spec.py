"""Keys and values that the cache keeps as latents of groups of heads."""

import re
from typing import ClassVar, Literal

from gac.core.errors import PlanError
from gac.core.operations import Operation, attend_latents, batched_gemm
from gac.forms.base import Form, ModuleSpec, Place, Split, ends
from gac.forms.low_rank.spec import low_rank
from gac.models.sites import Weight
from gac.runtime.limits import token_words

_PARAMETER = re.compile(r"(?P<group>[1-9][0-9]{0,5})(:int(?P<bits>[48]))?|int(?P<alone>[48])")
DEFAULT_GROUP = 4


def named(group: int, bits: int | None = None) -> str:
    """As plans write the form.

    >>> named(4), named(1), named(4, 8), named(1, 4)
    ('latent', 'latent:1', 'latent:int8', 'latent:1:int4')
    """
    parts = ["latent", *([] if group == DEFAULT_GROUP else [str(group)]), *([f"int{bits}"] if bits else [])]
    return ":".join(parts)


class Latent(Form):
    """k_proj or v_proj as a low-rank pair for each group of heads, all of one rank (PaLU, arXiv 2407.21118).

    W's rows of one group are B_g A_g with B_g ``(rows of the group, rank)`` and A_g ``(rank, in)``. The A_g are one
    GEMM together, the B_g a batched GEMM. What the A_g write, the latents, is what the KV cache keeps of a token: keys
    before norms and rotary embedding. Attention multiplies them out when it reads them, see ``gac.runtime.latents``.
    Its GEMMs are timed one by one, and attention over latents beside that over a dense cache. Rows of 16 bytes want
    ranks that are multiples of 8 in 16 bit. Where a group is one head, ``head_dim`` folds V's second factor into
    o_proj, and is the cheaper form.

    Args:
        group: heads in a group. A layer with no more heads than that is one group.
    """

    symbol = "g"
    meaning = "rank of a latent for each group of heads"
    tensor_form = "gac.forms.latent.torch:LatentTensors"
    step = 8
    timed = False
    counts: ClassVar[Literal["params", "cached"] | None] = "cached"
    attended = True
    anchors: ClassVar[tuple[float, ...]] = (0.03, 0.1, 0.4)

    def __init__(self, group: int = DEFAULT_GROUP) -> None:
        self.group = group
        self.name = named(group)

    def with_parameter(self, text: str) -> "Latent":
        """Groups of N heads, in a cache of few bits where the text says so: ``N``, ``int8``, ``N:int8``, ``N:int4``.

        Raises:
            PlanError: it says neither.
        """
        found = _PARAMETER.fullmatch(text)
        if found is None:
            expected = "latent:N with a number of heads of 1 or more, latent:int8, latent:int4, latent:N:int8 or so"
            raise PlanError(f"form latent:{text}", expected, "Correct the name.")
        group, bits = int(found["group"] or DEFAULT_GROUP), found["bits"] or found["alone"]
        return Latent(group) if bits is None else RoundedLatent(group, int(bits))

    def takes(self, weight: Weight) -> bool:
        return weight.cached and weight.heads > 0

    def groups(self, weight: Weight) -> int:
        """How many groups the weight's heads make.

        Raises:
            PlanError: the heads cannot be divided into such groups.
        """
        if weight.heads > self.group and weight.heads % self.group:
            divisors = [str(size) for size in range(1, weight.heads + 1) if weight.heads % size == 0]
            raise PlanError(
                f"groups of {self.group} of the {weight.heads} heads of {weight.name}",
                f"groups of {', '.join(divisors)} heads",
                f"Give the number of heads after a colon: {named(int(divisors[-1]), self.bits)}, or the method "
                f"palu:{divisors[-1]}.",
            )
        return max(1, weight.heads // self.group)

    def full(self, weight: Weight) -> int:
        return min(weight.out_features // self.groups(weight), weight.in_features)

    def params(self, weight: Weight, dim: int) -> int:
        return dim * (self.groups(weight) * weight.in_features + weight.out_features)

    def cached(self, weight: Weight, dim: int) -> int:
        return self.groups(weight) * dim

    def largest_useful(self, weight: Weight) -> int:
        """The largest dim with a smaller cache than the dense weight; its parameters may be more."""
        return self.full(weight) - 1

    def operation(self, weight: Weight, dim: int, rows: int) -> Operation:
        pair = low_rank(rows, weight.in_features, dim, weight.out_features)
        return Operation("latent", (("b", self.groups(weight)), *pair.shape))

    def attention(self, weight: Weight, dim: int, texts: int, context: int) -> Operation:
        """Beside latents of the other weight, of half of all numbers: of these one shape stands for all."""
        size, other = weight.out_features // weight.heads, self.beside(weight)
        k, v = (other, dim) if weight.values else (dim, other)
        return attend_latents(texts, weight.asked, weight.heads, context, size, self.groups(weight), k, v, self.bits)

    def cache_axis(self, weight: Weight) -> str:
        return "v" if weight.values else "k"

    def beside(self, weight: Weight) -> int:
        """The rank of the other weight's latents where attention is measured along this one's."""
        return max(2 * self.step, self.full(weight) // (4 * self.step) * 2 * self.step)

    def splits(self, weight: Weight) -> tuple[Split, ...]:
        """Whole groups: each GPU multiplies its latents out by itself."""
        return "colwise", "colwise"

    def axis(self, weight: Weight) -> str:
        return "r"

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        sizes = {"in_features": weight.in_features, "groups": self.groups(weight), "rank": dim}
        return ModuleSpec("LatentLinear", sizes | {"out_features": weight.out_features})

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return Place("first.weight", 0, ends(dim, self.groups(weight))), Place("second.weight", 2, (dim,))

    def fused(self, weight: Weight, dim: int) -> int:
        return self.groups(weight) * dim

    def after(self, weight: Weight, dim: int, rows: int) -> Operation:
        groups = self.groups(weight)
        return batched_gemm(groups, rows, dim, weight.out_features // groups)


class RoundedLatent(Latent):
    """The same pairs, whose latents are rounded to 8 or 4 bits between the factors, and lie in the cache so.

    Each token and group has a scale of 16 bits (``gac.runtime.latents.quantise``). The price of a rank is that of the
    latents before, and of their rounding (``gac.forms.latent.rounded``). What the cache keeps is counted in words of 16
    bits, so it is as exact as the numbers of other forms.

    Args:
        group: as for ``Latent``.
        bits: of a number, 8 or 4.
    """

    meaning = "rank of a latent for each group of heads / bits of its numbers in the KV cache"
    tensor_form = "gac.forms.latent.rounded:RoundedLatentTensors"
    counts = None
    anchors = ()

    def __init__(self, group: int, bits: int) -> None:
        super().__init__(group)
        self.bits, self.name = bits, named(group, bits)

    @property
    def upon(self) -> Latent:
        return Latent(self.group)

    def cached(self, weight: Weight, dim: int) -> int:
        assert self.bits is not None
        return token_words(self.groups(weight), dim, self.bits)

    def largest_useful(self, weight: Weight) -> int:
        """All: rounded latents of the full rank are fewer bytes than the dense weight's features."""
        return self.full(weight)

    def told(self, dim: int) -> str:
        return f"{super().told(dim)}/{self.bits}"

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        assert self.bits is not None
        return ModuleSpec("RoundedLatentLinear", {**super().module(weight, dim).sizes, "bits": self.bits})
