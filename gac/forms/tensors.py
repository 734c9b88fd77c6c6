"""The seam of forms where tensors are at hand: measure what a dim loses, build, merge, fit again."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.core.linalg import unpacked
from gac.forms.base import Form
from gac.forms.curvature.metric import Metric, Moments
from gac.forms.refit import Refits, WeightRefit, refit_whole
from gac.models.linears import linear_at, read_weight
from gac.models.sites import Weight
from gac.models.streaming import on_its_device
from gac.runtime.modules import KINDS

if TYPE_CHECKING:
    from gac.forms.curvature.methods import Method
    from gac.measurement.runs import ModelRuns
    from gac.schemes import Scheme
    from gac.schemes.inputs import Inputs


class Kept:
    """What is kept of a layer after calibration, so that compressing needs no statistics; each read when asked for.

    Args:
        tensors: by ``<form>.<name>/<weight>``, and what all forms share by ``<name>/<weight>``.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def of(self, form: Form, name: str, weight: Weight) -> Tensor:
        """What a form has kept of a weight, see ``Fit.tensors``."""
        return self.tensors[f"{form.name}.{name}/{weight.name}"]

    def tokens(self, weight: Weight) -> Tensor:
        """How much each token counts, shape ``(windows, tokens)``."""
        return self.tensors[f"tokens/{weight.name}"]

    def gradients(self, weight: Weight) -> Tensor:
        """G of a weight that writes to the residual stream or that scores come of, or whose moments a form keeps."""
        return unpacked(self.tensors[f"gradients/{weight.name}"], weight.out_features)

    def moments(self, weight: Weight) -> Moments:
        """Of a weight whose moments a form asked to keep."""
        return replace(self.inputs(weight), gradients=self.gradients(weight))

    def inputs(self, weight: Weight) -> Moments:
        """Of a weight whose moments or inputs a form or rounding asked to keep; those of its gradients are empty."""
        inputs = unpacked(self.tensors[f"inputs/{weight.name}"], weight.in_features)
        return Moments(inputs, inputs.new_empty(0, 0), self.tensors[f"scale/{weight.name}"])


@dataclass(frozen=True, eq=False)
class Statistics:
    """The dense weights of some layers, and what is known of them.

    Attributes:
        model: the dense model.
        moments: what was seen of a weight.
        method: what errors are measured in.
        kept: what forms that were measured before have kept of the layer; where it is built, all that was kept.
        losses: their curves by ``<form>/<weight>``, nats a token at every dim; where it is built there are none.
        runs: runs the model with some of it changed; there for forms that are measured so, or have ``anchors``: for
            these on text that ``attended`` has not seen. For those that need no statistics nothing else was seen.
        attended: what was seen of keys' or values' weight as attention reads what is cached; there for forms that are
            ``attended``, where the method is two-sided.
    """

    model: nn.Module
    moments: Callable[[Weight], Moments]
    method: "Method"
    kept: Kept
    runs: "ModelRuns | None" = None
    losses: Mapping[str, Floats] = field(default_factory=dict)
    attended: Callable[[Weight], Moments] | None = None

    def matrix(self, weight: Weight) -> Tensor:
        """W, shape ``(out, in)``, in the model's dtype."""
        return read_weight(self.model, weight.name)

    def metric(self, weight: Weight) -> Metric:
        """What errors of the weight are measured in."""
        return self.method.metric(self.moments(weight))

    def cached_metric(self, weight: Weight) -> Metric:
        """The same of k_proj or v_proj where what is cached changes, as attention reads it if that was measured."""
        return self.method.metric((self.attended or self.moments)(weight))


@dataclass(frozen=True, eq=False)
class Fit:
    """What one form has measured of one weight, or of several that it takes together.

    Attributes:
        weight: the one; of several, the one that is shorter on its input.
        loss: nats a token at every dim from 0 to the full one, shape ``(full + 1,)``.
        tensors: what building needs, by a name of the form's own; ``Kept.of`` finds them.
        moments: the weights whose moments building needs, see ``Kept.moments``.
        inputs: the weights of whose moments it needs those of the inputs, see ``Kept.inputs``.
        form: of those that the measuring form stands for (``Form.variants``) the one that this is of; None: itself.
    """

    weight: Weight
    loss: Floats
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    moments: Sequence[Weight] = ()
    inputs: Sequence[Weight] = ()
    form: Form | None = None


@dataclass(frozen=True, eq=False)
class SiteWork:
    """The weights of one site that are being compressed.

    Attributes:
        weights: all of them, those that stay dense too.
        kept: of the site's layer.
        statistics: their moments are those that forms asked to keep.
        shared: whatever weights of the site that are built together have in common, for forms to fill.
    """

    weights: Sequence[Weight]
    kept: Kept
    statistics: Statistics
    shared: dict[str, Any] = field(default_factory=dict)

    def linear(self, weight: Weight) -> nn.Linear:
        """The dense weight and its bias."""
        return linear_at(self.statistics.model, weight.name)


class TensorForm(ABC):
    """What a form does with tensors.

    Args:
        form: its other half.
    """

    refits: ClassVar[Refits] = {"residual": refit_whole}
    """How a module that was built takes a weight that is fitted again, by the way of fitting; see ``gac.forms.refit``.
    A way that is left out leaves the weight as it is, as do weights that ``refit`` leaves out."""

    def __init__(self, form: Form) -> None:
        self.form = form

    def refit(self, how: str, weight: Weight) -> Callable[[WeightRefit, nn.Module], None] | None:
        """How a module that was built for a weight is fitted again; None leaves it as it is."""
        return self.refits.get(how)

    @abstractmethod
    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        """Loss curves, and what building needs.

        Args:
            weights: all of one layer, those among them that cannot have the form too.

        Raises:
            ModelError: a statistic is not finite.
        """

    @abstractmethod
    def parameters(self, work: SiteWork, weight: Weight, dim: int) -> dict[str, Tensor] | None:
        """The parameters of the module ``form.module(weight, dim)``, by their names in it; None: it stays as it is."""

    def empty(self, weight: Weight, dim: int, bias: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The module of a weight at a dim; its parameters are allocated, not initialised.

        Args:
            bias: whether it adds one, as the dense weight did.
            device: where to put it; ``meta`` allocates nothing.
        """
        spec = self.form.module(weight, dim)
        return KINDS[spec.module][0](**spec.sizes, bias=bias, device=device, dtype=dtype)

    def module(self, work: SiteWork, weight: Weight, dim: int) -> nn.Module:
        """The module that runs a weight at a dim, where the dense weight runs and in its dtype."""
        with on_its_device(work.statistics.model.get_submodule(weight.name)):
            linear, parameters = work.linear(weight), self.parameters(work, weight, dim)
            assert parameters is not None, f"{weight.name} stays as it is"
            module = self.empty(weight, dim, linear.bias is not None, linear.weight.device, linear.weight.dtype)
            module.load_state_dict(parameters)
        return module

    def rounding(self, statistics: Statistics, weight: Weight, scheme: "Scheme", inputs: "Inputs") -> Floats | None:
        """What storing the weight in a scheme adds to the loss at every dim, nats a token, shape ``(full + 1,)``.

        None: as much as of the dense weight, for each parameter that is left.

        Args:
            statistics: with what was kept when the form was measured.
            inputs: of the dense weight in the metric, as schemes are told of them.
        """
        return None

    def merge(self, weight: Weight, dim: int, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The dense ``weight (out, in)``, and ``bias (out,)`` where there is one, of the same function up to rounding.

        Here: zeros where the dim is shorter than the full one.

        Args:
            own: the module's parameters, by their names in it.
        """
        filled, missing = dict(own), self.form.full(weight) - dim
        for place in self.form.places(weight, dim):
            if place.tensor in own:
                put_in = [Insertion(place.axis, end, missing * place.unit) for end in place.ends]
                filled[place.tensor] = with_zeros(own[place.tensor], put_in)
        return filled


def bias_of(linear: nn.Linear, name: str = "bias") -> dict[str, Tensor]:
    """The bias under a name, where there is one."""
    return {} if linear.bias is None else {name: linear.bias}


@dataclass(frozen=True)
class Insertion:
    """``count`` zeros along ``axis`` at ``position``."""

    axis: int
    position: int
    count: int


def with_zeros(tensor: Tensor, put_in: Iterable[Insertion]) -> Tensor:
    """The tensor with zeros put in; every number of it is kept, bit for bit."""
    put_in = list(put_in)
    for axis in sorted({one.axis for one in put_in}):
        pieces, start = [], 0
        for one in sorted((one for one in put_in if one.axis == axis), key=lambda one: one.position):
            zeros = tensor.new_zeros(*tensor.shape[:axis], one.count, *tensor.shape[axis + 1 :])
            pieces += [tensor.narrow(axis, start, one.position - start), zeros]
            start = one.position
        pieces.append(tensor.narrow(axis, start, tensor.shape[axis] - start))
        tensor = torch.cat(pieces, dim=axis)
    return tensor
