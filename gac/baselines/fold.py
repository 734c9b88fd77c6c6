"""Shorter value vectors as PaLU makes them: V truncated by itself, its second factor folded into o_proj.

With V_g ~ B_g A_g for the rows of one key-value head, attention mixes A_g x instead of V_g x, and o_proj has O_h B_g in
place of O_h for every query head h that reads them (PaLU, arXiv 2407.21118). It runs as the form ``head_dim``, but the
directions are those that lose least of V, and o_proj is multiplied and not re-solved.
"""

import numpy as np
import torch
from torch import Tensor

from gac.curves import LossCurve
from gac.forms.decomposition import decompose
from gac.forms.metric import Measured, Metric
from gac.forms.shortened_values import ShortenedValues


def fold_values(values: Measured, output: Tensor, heads: int, groups: int) -> ShortenedValues:
    """Truncate each key-value head's rows of v_proj, and fold what follows into o_proj.

    Args:
        values: its metric has gradients that are a multiple of the identity (PaLU's), so that the best rows of a rank
            are a projection on orthonormal directions.
        output: o_proj's weight, shape ``(out, heads * head_dim)``.
    """
    rows = values.weight.detach().double().view(groups, -1, values.weight.shape[1])
    head_dim = rows.shape[1]
    assert head_dim <= rows.shape[2], "a head has more rows than v_proj has inputs"
    metric = Metric(values.metric.inputs, values.metric.gradients[:head_dim, :head_dim])
    found = [decompose(group, metric) for group in rows]
    directions = torch.stack([(group.second / group.second.norm(dim=0)).T for group in found])
    weight = output.detach().double().reshape(-1, heads, head_dim)
    folded = torch.einsum("ohd,hld->ohl", weight, directions.repeat_interleave(heads // groups, 0))
    curve = LossCurve(np.sum([group.curve.loss for group in found], axis=0))
    return ShortenedValues(directions, folded, None, curve)
