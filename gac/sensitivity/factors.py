"""What compressing a layer needs, for every dim at once, so that its statistics need not be kept or taken again.

Of every weight the factors of all ranks, in the model's dtype and balanced, so that those of a rank are its first
columns and rows; the same for each group of heads where the method has groups. Of a weight that a form shortens on its
input the moments, packed, for it is re-solved for the dim that is chosen; of v_proj too where the method truncates it
by itself; and of down_proj the order in which its neurons go. What fits the factors again to a partly compressed model
(``gac.compression.refit``) needs how much every token counts, and of the metric of the gradients the part that matters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from gac.arrays import Floats
from gac.forms import form_named
from gac.forms.grouped.spec import Grouped
from gac.models.linears import read_weight
from gac.models.sites import Site
from gac.models.weights import Weight
from gac.sensitivity.calibration import LayerMoments, Moments
from gac.sensitivity.groups import decompose_groups
from gac.sensitivity.linalg import packed, unpacked
from gac.sensitivity.methods import Method, decompose
from gac.sensitivity.narrow import eliminate, last_to_go
from gac.sensitivity.values import shortened


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """One layer's, by what they are and the weight's name, as they are kept on disk."""

    tensors: Mapping[str, Tensor]

    def low_rank(self, weight: Weight, rank: int) -> tuple[Tensor, Tensor]:
        """``(second (out, rank), first (rank, in))``."""
        second, first = self.every_rank(weight)
        return second[:, :rank], first[:rank]

    def every_rank(self, weight: Weight) -> tuple[Tensor, Tensor]:
        """``(second (out, full), first (full, in))``, the largest singular value first."""
        return self.tensors[f"second/{weight.name}"], self.tensors[f"first/{weight.name}"]

    def grouped(self, weight: Weight, rank: int) -> tuple[Tensor, Tensor]:
        """``(second (groups, rows, rank), first (groups * rank, in))`` of the method's groups of heads."""
        second, first = (self.tensors[f"grouped_{what}/{weight.name}"] for what in ("second", "first"))
        return second[:, :, :rank], first.view(len(second), -1, weight.in_features)[:, :rank].flatten(0, 1)

    def gains(self, weight: Weight) -> Tensor:
        """Squared lengths, in the metric of the gradients, of the columns of the second factor, float64 ``(full,)``."""
        return self.tensors[f"gains/{weight.name}"]

    def gradients(self, weight: Weight) -> Tensor:
        """Second moment of the gradients at the output of a weight that writes to the residual stream."""
        return unpacked(self.tensors[f"gradients/{weight.name}"], weight.out_features)

    def tokens(self, weight: Weight) -> Tensor:
        """How much each token counts, shape ``(windows, tokens)``."""
        return self.tensors[f"tokens/{weight.name}"]

    def kept(self, weight: Weight, width: int) -> Tensor:
        """Indices of the neurons that stay at a width, ascending; ``weight`` is the one that reads them."""
        return last_to_go(self.tensors[f"order/{weight.name}"], width)

    def moments(self, weight: Weight) -> Moments:
        """Of a weight that a form shortens on its input, or of v_proj where the method folds it."""
        name = weight.name
        return Moments(
            unpacked(self.tensors[f"inputs/{name}"], weight.in_features),
            self.gradients(weight),
            self.tensors[f"scale/{name}"],
        )


@dataclass(frozen=True, eq=False)
class LayerFit:
    """One layer's loss curves and factors; curves by ``low_rank/<weight>``, ``grouped/<weight>``, ``shorter/<weight>``.

    The last stands for the weights that a form shortens together, and names the one that is shorter on its input.
    """

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
    for weight in weights:
        of_weight, of_tensors = _fit_weight(model, weight, moments.of(weight), method)
        losses |= {f"{what}/{weight.name}": loss for what, loss in of_weight.items()}
        tensors |= {f"{what}/{weight.name}": tensor for what, tensor in of_tensors.items()}
        tensors[f"tokens/{weight.name}"] = moments.tokens(weight)
    for output in (weight for weight in weights if weight.values == "in"):
        values = next(weight for weight in weights if weight.values == "out")
        found = shortened(model, method, values, output, lambda weight: method.metric(moments.of(weight)))
        losses[f"shorter/{output.name}"] = found.curve.loss
    return LayerFit(losses, LayerFactors(tensors))


def _fit_weight(
    model: nn.Module, weight: Weight, moments: Moments, method: Method
) -> tuple[dict[str, Floats], dict[str, Tensor]]:
    matrix = read_weight(model, weight.name)
    metric = method.metric(moments)
    found = decompose(matrix, metric)
    losses = {"low_rank": found.curve.loss}
    second, first = found.factors(found.curve.full)
    tensors = {"second": second.to(matrix.dtype), "first": first.to(matrix.dtype), "gains": found.gains}
    if weight.writes:
        tensors["gradients"] = packed(moments.gradients)
    folded = method.folds and weight.values == "out"
    if folded or "in" in (weight.neurons, weight.values):
        tensors |= {"inputs": packed(moments.inputs), "gradients": packed(moments.gradients), "scale": moments.scale}
    if weight.neurons == "in":
        elimination = eliminate(matrix, metric)
        losses["shorter"] = elimination.curve.loss
        tensors["order"] = elimination.order
    for form in (form for form in map(form_named, method.forms) if isinstance(form, Grouped)):
        if form.takes(weight) and not folded:
            grouped = decompose_groups(matrix, metric, form.groups(weight))
            losses["grouped"] = grouped.curve.loss
            second, first = grouped.factors(grouped.curve.full)
            tensors |= {"grouped_second": second.to(matrix.dtype), "grouped_first": first.to(matrix.dtype)}
    return losses, tensors
