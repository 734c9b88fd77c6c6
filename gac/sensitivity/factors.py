"""What compressing a layer needs, for every dim at once, so that its statistics need not be kept or taken again.

Of every weight the factors of all ranks, in the model's dtype and balanced, so that those of a rank are its first
columns and rows. Of a weight that a form shortens on its input the moments, packed, for it is re-solved for the dim
that is chosen; and of down_proj the order in which its neurons go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from gac.forms import Weight
from gac.models.linears import read_weight
from gac.sensitivity.calibration import LayerMoments, Moments
from gac.sensitivity.linalg import packed, unpacked
from gac.sensitivity.methods import Method, decompose
from gac.sensitivity.narrow import eliminate, last_to_go
from gac.sensitivity.values import shorten_values
from gac.sites import Floats, Site


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """One layer's, by what they are and the weight's name, as they are kept on disk."""

    tensors: Mapping[str, Tensor]

    def low_rank(self, weight: Weight, rank: int) -> tuple[Tensor, Tensor]:
        """``(second (out, rank), first (rank, in))``."""
        return self.tensors[f"second/{weight.name}"][:, :rank], self.tensors[f"first/{weight.name}"][:rank]

    def kept(self, weight: Weight, width: int) -> Tensor:
        """Indices of the neurons that stay at a width, ascending; ``weight`` is the one that reads them."""
        return last_to_go(self.tensors[f"order/{weight.name}"], width)

    def moments(self, weight: Weight) -> Moments:
        """Of a weight that a form shortens on its input."""
        name = weight.name
        return Moments(
            unpacked(self.tensors[f"inputs/{name}"], weight.in_features),
            unpacked(self.tensors[f"gradients/{name}"], weight.out_features),
            self.tensors[f"scale/{name}"],
        )


@dataclass(frozen=True, eq=False)
class LayerFit:
    """One layer's loss curves, by ``low_rank/<weight>`` and ``shorter/<weight>``, and its factors."""

    losses: Mapping[str, Floats]
    factors: LayerFactors


def fit_layer(model: nn.Module, sites: Sequence[Site], moments: LayerMoments, method: Method) -> LayerFit:
    """Decompose the weights of one layer's sites, order its neurons and its value dims.

    Raises:
        ModelError: a statistic is not finite.
    """
    losses: dict[str, Floats] = {"loss": np.array(moments.loss)}
    tensors: dict[str, Tensor] = {}
    weights = [weight for site in sites for weight in site.weights]
    groups = next((weight.heads for weight in weights if weight.values == "out"), 0)
    for weight in weights:
        of_weight, of_tensors = _fit_weight(model, weight, moments.of(weight), method, groups)
        losses |= {f"{what}/{weight.name}": loss for what, loss in of_weight.items()}
        tensors |= {f"{what}/{weight.name}": tensor for what, tensor in of_tensors.items()}
    return LayerFit(losses, LayerFactors(tensors))


def _fit_weight(
    model: nn.Module, weight: Weight, moments: Moments, method: Method, groups: int
) -> tuple[dict[str, Floats], dict[str, Tensor]]:
    matrix = read_weight(model, weight.name)
    metric = method.metric(moments)
    found = decompose(matrix, metric)
    losses = {"low_rank": found.curve.loss}
    second, first = found.factors(found.curve.full)
    tensors = {"second": second.to(matrix.dtype), "first": first.to(matrix.dtype)}
    if "in" in (weight.neurons, weight.values):
        tensors |= {"inputs": packed(moments.inputs), "gradients": packed(moments.gradients), "scale": moments.scale}
    if weight.neurons == "in":
        elimination = eliminate(matrix, metric)
        losses["shorter"] = elimination.curve.loss
        tensors["order"] = elimination.order
    if weight.values == "in":
        losses["shorter"] = shorten_values(matrix, metric, weight.heads, groups).curve.loss
    return losses, tensors
