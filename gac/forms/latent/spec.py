"""Keys and values that the cache keeps as latents of groups of heads."""

import re

from gac.errors import PlanError
from gac.forms.base import Form, ModuleSpec, Place, Split, ends
from gac.forms.low_rank.spec import low_rank
from gac.models.sites import Weight
from gac.operations import Operation, attend_latents, batched_gemm

_GROUP = re.compile(r"[1-9][0-9]{0,5}")
DEFAULT_GROUP = 4


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
    counts = "cached"
    attended = True

    def __init__(self, group: int = DEFAULT_GROUP) -> None:
        self.group = group
        self.name = "latent" if group == DEFAULT_GROUP else f"latent:{group}"

    def with_parameter(self, text: str) -> "Latent":
        """Groups of N heads, from the text of N.

        Raises:
            PlanError: it is no such number.
        """
        if not _GROUP.fullmatch(text):
            raise PlanError(f"form latent:{text}", "latent:N with a number of heads of 1 or more", "Correct the name.")
        return Latent(int(text))

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
                f"Give the number of heads after a colon: latent:{divisors[-1]}, or the method palu:{divisors[-1]}.",
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
        return attend_latents(texts, weight.asked, weight.heads, context, size, self.groups(weight), k, v)

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
