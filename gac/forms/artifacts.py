"""Results of calibration that are kept on disk, by layer."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from gac.core.linalg import unpacked
from gac.forms.base import Form
from gac.forms.curvature.metric import Moments
from gac.models.sites import Weight


class LayerArtifacts:
    """Tensors of a layer from which it is compressed without its statistics; each is read when it is asked for.

    Args:
        tensors: by ``<form>.<name>/<weight>``, and those that all forms share by ``<name>/<weight>``.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def of(self, form: Form, name: str, weight: Weight) -> Tensor:
        return self.tensors[f"{form.name}.{name}/{weight.name}"]

    def tokens(self, weight: Weight) -> Tensor:
        return self.tensors[f"tokens/{weight.name}"]

    def gradients(self, weight: Weight) -> Tensor:
        """G of a weight that writes to the residual stream or yields scores, or whose moments a form keeps."""
        return unpacked(self.tensors[f"gradients/{weight.name}"], weight.out_features)

    def moments(self, weight: Weight) -> Moments:
        return replace(self.inputs(weight), gradients=self.gradients(weight))

    def inputs(self, weight: Weight) -> Moments:
        """Of a weight whose moments or inputs a form or quantisation keeps, without its gradients."""
        inputs = unpacked(self.tensors[f"inputs/{weight.name}"], weight.in_features)
        return Moments(inputs, inputs.new_empty(0, 0), self.tensors[f"scale/{weight.name}"])
