"""The seam of forms where tensors are at hand: measure what a dim loses, build, merge, fit again."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gac.core.arrays import Floats
from gac.forms.artifacts import LayerArtifacts
from gac.forms.base import Form
from gac.forms.curvature.methods import Method
from gac.forms.curvature.metric import Metric, Moments, RoutedTokens
from gac.forms.refit import Refits, WeightRefit, refit_matrix
from gac.models.linears import linear_at, read_weight
from gac.models.sites import Weight
from gac.models.streaming import on_its_device
from gac.runtime.modules import KINDS
from gac.schemes import Scheme
from gac.schemes.feedback.order import Inputs


class ModelRuns(Protocol):
    """Runs of the dense model with some modules replaced."""

    @property
    def layers(self) -> int:
        """Number of layers of the model."""

    @property
    def length(self) -> int:
        """Tokens of the longest text."""

    def divergence(self, modules: Mapping[str, nn.Module]) -> float:
        """Loss with these modules in place of those of the same names, nats a token."""

    def mean_output(self, weight: Weight) -> Tensor:
        """Mean output of a dense weight, shape ``(out,)``."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """The dense weights of some layers, and what is known of them.

    Attributes:
        model: the dense model.
        moments: the moments of a weight.
        method: the method that measures errors.
        artifacts: of forms that were measured before; where a site is built, all of the layer's.
        losses: curves of forms that were measured before, by ``<form>/<weight>``; none where a site is built.
        runs: for forms that need forward runs or have ``anchors``; for the latter on text that ``attended`` has not
            seen. For forms that need no statistics there is nothing else.
        attended: moments of k_proj's or v_proj's weight under attention over the cache; for forms that use them, where
            the method is two-sided.
        routed: tokens of routed experts; for forms that use them.
    """

    model: nn.Module
    moments: Callable[[Weight], Moments]
    method: Method
    artifacts: LayerArtifacts
    runs: ModelRuns | None = None
    losses: Mapping[str, Floats] = field(default_factory=dict)
    attended: Callable[[Weight], Moments] | None = None
    routed: Callable[[Weight], RoutedTokens] | None = None

    def matrix(self, weight: Weight) -> Tensor:
        """W, shape ``(out, in)``, in the model's dtype."""
        return read_weight(self.model, weight.name)

    def metric(self, weight: Weight) -> Metric:
        return self.method.metric(self.moments(weight))

    def cached_metric(self, weight: Weight) -> Metric:
        """The metric of k_proj or v_proj for errors in the cache, under attention over it where that was measured."""
        return self.method.metric((self.attended or self.moments)(weight))


@dataclass(frozen=True, eq=False)
class Fit:
    """The measurement of one weight in a form, or of several that it takes together.

    Attributes:
        weight: of several, the one that is shorter on its input.
        loss: nats a token at every dim from 0 to the full one, shape ``(full + 1,)``.
        tensors: for building, by a name that the form chooses; ``LayerArtifacts.of`` finds them.
        moments: weights whose moments building needs, see ``LayerArtifacts.moments``.
        inputs: weights of whose moments it needs those of the inputs, see ``LayerArtifacts.inputs``.
        form: the variant that was measured (``Form.variants``); None: the measuring form itself.
        reached: of experts, the sampled tokens that reach each, shape ``(experts,)``.
    """

    weight: Weight
    loss: Floats
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    moments: Sequence[Weight] = ()
    inputs: Sequence[Weight] = ()
    form: Form | None = None
    reached: Floats | None = None


@dataclass(frozen=True, eq=False)
class SiteBuild:
    """The weights of one site that are being compressed.

    Attributes:
        weights: all of them, also those that stay dense.
        statistics: with the moments and the artifacts that forms keep.
        cache: results that the weights of the site share, filled by forms.
    """

    weights: Sequence[Weight]
    statistics: Statistics
    cache: dict[str, Any] = field(default_factory=dict)

    @property
    def artifacts(self) -> LayerArtifacts:
        return self.statistics.artifacts

    def linear(self, weight: Weight) -> nn.Linear:
        return linear_at(self.statistics.model, weight.name)


class TensorForm(ABC):
    """A form's operations on tensors."""

    refits: ClassVar[Refits] = {"residual": refit_matrix}
    """Refit functions by refit mode, see ``gac.forms.refit``. In other modes the module stays as it is."""

    def __init__(self, form: Form) -> None:
        self.form = form

    def refit(self, mode: str, weight: Weight) -> Callable[[WeightRefit, nn.Module], None] | None:
        """The function that fits a built module of the weight again; None leaves it as it is."""
        return self.refits.get(mode)

    @abstractmethod
    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        """Loss curves, and the tensors for building, of all weights of one layer that can have the form."""

    @abstractmethod
    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> dict[str, Tensor] | None:
        """The parameters of the module ``form.module(weight, dim)``, by their names in it; None: it stays as it is."""

    def empty(self, weight: Weight, dim: int, bias: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The module of a weight at a dim; its parameters are allocated (not on ``meta``), and not initialised."""
        spec = self.form.module(weight, dim)
        return KINDS[spec.module][0](**spec.sizes, bias=bias, device=device, dtype=dtype)

    def module(self, build: SiteBuild, weight: Weight, dim: int) -> nn.Module:
        """The module of a weight at a dim, on the device and in the dtype of the dense weight."""
        with on_its_device(build.statistics.model.get_submodule(weight.name)):
            linear, parameters = build.linear(weight), self.parameters(build, weight, dim)
            assert parameters is not None, f"{weight.name} stays as it is"
            module = self.empty(weight, dim, linear.bias is not None, linear.weight.device, linear.weight.dtype)
            module.load_state_dict(parameters)
        return module

    def rounding(self, statistics: Statistics, weight: Weight, scheme: Scheme, inputs: Inputs) -> Floats | None:
        """Loss that quantising the weight adds at every dim, nats a token, shape ``(full + 1,)``.

        None: as much per remaining parameter as for the dense weight, whose ``inputs`` are given.
        """
        return None

    def merge(self, weight: Weight, dim: int, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The dense ``weight (out, in)``, and ``bias (out,)`` where there is one, of the same function up to rounding.

        Here: the module's ``parameters``, with zeros where the dim is shorter than the full one.
        """
        filled, missing = dict(parameters), self.form.full(weight) - dim
        for place in self.form.places(weight, dim):
            if place.tensor in parameters:
                insertions = [Insertion(place.axis, end, missing * place.unit) for end in place.ends]
                filled[place.tensor] = with_zeros(parameters[place.tensor], insertions)
        return filled


class DenseTensors(TensorForm):
    """A weight as it is: nothing is measured or built, and it can be fitted again."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        return iter(())

    def parameters(self, build: SiteBuild, weight: Weight, dim: int) -> None:
        return None


class RunForm(TensorForm):
    """A form with two choices, the least dim and the dense weights; it needs no statistics."""

    @abstractmethod
    def modules(self, runs: ModelRuns, group: Sequence[Weight]) -> dict[str, nn.Module]:
        """The modules that replace weights that the form takes together, by name."""

    def measure(self, statistics: Statistics, weights: Sequence[Weight]) -> Iterator[Fit]:
        assert statistics.runs is not None, f"{self.form.name} is measured by running the model"
        for group in joint_weights(self.form, weights):
            modules = self.modules(statistics.runs, group)
            loss = statistics.runs.divergence(modules)
            parameters = {name: value.detach() for name, value in modules[group[-1].name].named_parameters()}
            yield Fit(group[-1], np.array([loss, 0.0]), parameters)


def joint_weights(form: Form, weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """The weights that a form takes together, each time those up to one that it shortens on its input."""
    group: list[Weight] = []
    for weight in filter(form.applies_to, weights):
        group.append(weight)
        if form.shortens(weight) == "in":
            yield group
            group = []


def tensors_of(form: Form) -> TensorForm:
    operations: TensorForm = resolve_name(form.tensor_form)(form)
    return operations


def bias_of(linear: nn.Linear, name: str = "bias") -> dict[str, Tensor]:
    return {} if linear.bias is None else {name: linear.bias}


@dataclass(frozen=True)
class Insertion:
    """``count`` zeros along ``axis`` at ``position``."""

    axis: int
    position: int
    count: int


def with_zeros(tensor: Tensor, insertions: Iterable[Insertion]) -> Tensor:
    """The tensor with zeros inserted; its own numbers stay bit for bit."""
    insertions = list(insertions)
    for axis in sorted({insertion.axis for insertion in insertions}):
        pieces, start = [], 0
        along = (insertion for insertion in insertions if insertion.axis == axis)
        for insertion in sorted(along, key=lambda insertion: insertion.position):
            zeros = tensor.new_zeros(*tensor.shape[:axis], insertion.count, *tensor.shape[axis + 1 :])
            pieces += [tensor.narrow(axis, start, insertion.position - start), zeros]
            start = insertion.position
        pieces.append(tensor.narrow(axis, start, tensor.shape[axis] - start))
        tensor = torch.cat(pieces, dim=axis)
    return tensor
