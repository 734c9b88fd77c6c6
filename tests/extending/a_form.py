"""A form: a weight that reads fewer of its input features, the others compensated for.

Which features go is decided one at a time by optimal brain surgeon, as in structured pruning (OBC, arXiv 2208.11580;
ZipLM, arXiv 2302.04089). Here for weights that share their input with no other: o_proj and down_proj. The features
that stay are picked out of the input by an index, which is kept beside the matrix and counted by nobody.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from gac.forms import Form
from gac.forms.base import ModuleSpec, Place
from gac.forms.narrow.elimination import compensated, eliminate, last_to_go
from gac.forms.refit import Refits
from gac.forms.tensors import Fit, SiteBuild, Statistics, TensorForm, bias_of
from gac.models.sites import Weight
from gac.runtime.modules import KINDS, empty_linear


class PickedLinear(nn.Module):
    """y = W x[index] + bias, with W ``(out, kept)`` and index ``(kept,)``."""

    def __init__(
        self, in_features: int, kept: int, out_features: int, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.linear = empty_linear(kept, out_features, bias, device=device, dtype=dtype)
        self.register_buffer("index", torch.arange(kept, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.index_select(-1, self.index))


KINDS["PickedLinear"] = (PickedLinear, ("in_features", "kept", "out_features"))  # so that checkpoints can name it


class Picked(Form):
    """The dim is how many input features the weight still reads."""

    name = "picked"
    symbol = "i"
    meaning = "input features that a weight reads"
    tensor_form = f"{__name__}:PickedTensors"

    def applies_to(self, weight: Weight) -> bool:
        return weight.input_group is None

    def full(self, weight: Weight) -> int:
        return weight.in_features

    def params(self, weight: Weight, dim: int) -> int:
        return weight.out_features * dim

    def sides(self, weight: Weight, dim: int) -> tuple[int, int]:
        return dim, weight.out_features

    def module(self, weight: Weight, dim: int) -> ModuleSpec:
        sizes = {"in_features": weight.in_features, "kept": dim, "out_features": weight.out_features}
        return ModuleSpec("PickedLinear", sizes)

    def places(self, weight: Weight, dim: int) -> tuple[Place, ...]:
        return (Place("linear.weight", 1, (dim,)),)


class PickedTensors(TensorForm):
    """Keeps the order of removal, and the moments for compensation."""

    refits: ClassVar[Refits] = {}

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        for weight in filter(self.form.applies_to, weights):
            elimination = eliminate(statistics.matrix(weight), statistics.metric(weight))
            yield Fit(weight, elimination.curve.loss, {"order": elimination.order}, [weight])

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor]:
        index = last_to_go(build.artifacts.of(self.form, "order", weight), dim)
        dense = build.linear(weight)
        matrix = compensated(dense.weight, index, build.statistics.metric(weight))
        return {"linear.weight": matrix, "index": index} | bias_of(dense, "linear.bias")

    def merge(self, weight: Weight, dim: int, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        matrix = parameters["linear.weight"]
        dense = matrix.new_zeros(weight.out_features, weight.in_features)
        dense[:, parameters["index"]] = matrix
        return {"weight": dense} | ({"bias": parameters["linear.bias"]} if "linear.bias" in parameters else {})
