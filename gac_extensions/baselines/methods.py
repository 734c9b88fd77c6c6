"""Peers' methods, to compare with: plain SVD, ASVD, SVD-LLM and PaLU."""

import math

import torch
from torch import Tensor

from gac.core.errors import GacError
from gac.core.linalg import damped, identity_like
from gac.forms import form_named
from gac.forms.curvature.methods import Method
from gac.forms.curvature.metric import MeasuredWeight, Moments
from gac.forms.head_dim.torch import ShortenedValues
from gac.forms.latent.torch import decompose_groups


class Svd(Method):
    """Plain truncated SVD; curves weighted by tr(G)/out so that weights can be compared."""

    name = "svd"

    def inputs(self, moments: Moments) -> Tensor:
        return identity_like(moments.inputs)


class Asvd(Method):
    """Columns scaled by their mean absolute activation to the power ``alpha`` (S in ASVD, arXiv 2312.05821).

    A feature that never fires counts as the weakest one that does; if none does, all count the same.
    """

    def __init__(self, alpha: float = 0.5) -> None:
        self.alpha = alpha
        self.name = "asvd" if alpha == 0.5 else f"asvd:{alpha!r}"  # every digit: files are called by it

    def with_parameter(self, text: str) -> "Asvd":
        """``asvd:ALPHA``, in (0, 1]."""
        try:
            alpha = float(text)
        except ValueError:
            alpha = math.nan
        if not 0 < alpha <= 1:
            expected = "asvd:ALPHA with alpha above 0 and at most 1"
            raise GacError(f"method asvd:{text}", expected, "Write it like asvd:0.5.")
        return Asvd(alpha)

    def inputs(self, moments: Moments) -> Tensor:
        scale = moments.scale.double()
        fires = scale > 0
        scale = torch.where(fires, scale, scale[fires].min() if fires.any() else torch.ones_like(scale))
        return torch.diag(scale ** (2 * self.alpha))


class SvdLlm(Method):
    """Whitening by the activations (SVD-LLM, arXiv 2403.07378, section 3.1), with a root that cannot fail."""

    name = "svd-llm"

    def inputs(self, moments: Moments) -> Tensor:
        return damped(moments.inputs, 1e-6)


class Palu(SvdLlm):
    """PaLU: SVD-LLM's whitening, applied to groups of heads of k_proj and v_proj (arXiv 2407.21118).

    Everything else stays dense, and the budget is of the KV cache. A weight's groups have one rank.
    """

    def __init__(self, group: int = 4) -> None:
        form = form_named(f"latent:{group}")
        self.forms, self.name = (form.name,), form.name.replace(form.kind, "palu")

    def with_parameter(self, text: str) -> "Palu":
        """``palu:N``: groups of N heads, 1 or more."""
        if not text.isdecimal() or int(text) < 1:
            expected = "palu:N with a number of heads of 1 or more"
            raise GacError(f"method palu:{text}", expected, "Write it like palu:4.")
        return Palu(int(text))


class PaluFold(SvdLlm):
    """PaLU with groups of one head, and V's second factor folded into o_proj: the form ``head_dim`` for the values.

    With V_g ~ B_g A_g for the rows of one key-value head, attention mixes A_g x instead of V_g x, and o_proj has
    O_h B_g in place of O_h for every query head h that reads them (arXiv 2407.21118). The directions are those that
    lose least of V, and o_proj is multiplied and not re-solved.

    Attention here reads a latent for each key-value head, so folding a larger group would cache its latent once a head.
    """

    name = "palu-fold"
    forms = ("latent:1", "head_dim")
    folds = True

    def fold(self, values: MeasuredWeight, output: Tensor, heads: int, groups: int) -> ShortenedValues:
        """The gradients of the metric are a multiple of the identity: the best rows of a rank project on directions."""
        head_dim = len(values.weight) // groups
        assert head_dim <= values.weight.shape[1], "a head has more rows than v_proj has inputs"
        decomposed, curve = decompose_groups(values.weight, values.metric, groups)
        directions = torch.stack([(group.second / group.second.norm(dim=0)).T for group in decomposed])
        weight = output.detach().double().reshape(-1, heads, head_dim)
        folded = torch.einsum("ohd,hld->ohl", weight, directions.repeat_interleave(heads // groups, 0))
        return ShortenedValues(directions, folded, None, curve)
