"""Plan and factors to a smaller model: every module is built before the first one is swapped in."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn

from gac.compression.modules import empty_module
from gac.errors import PlanError
from gac.forms import form_named
from gac.models.linears import linear_at
from gac.models.sites import Site
from gac.models.weights import Weight
from gac.plan import Plan, WeightChoice
from gac.sensitivity.factors import LayerFactors
from gac.sensitivity.methods import Method, Metric
from gac.sensitivity.narrow import compensated
from gac.sensitivity.values import ShortenedValues, shortened


def changed_sites(plan: Plan, sites: Sequence[Site]) -> tuple[Site, ...]:
    """The sites that the plan changes, in model order.

    Args:
        sites: the model's own, from its family.

    Raises:
        PlanError: the plan's weights are not the model's.
    """
    theirs = [(choice.name, choice.out_features, choice.in_features) for choice in plan.weights]
    ours = [(weight.name, weight.out_features, weight.in_features) for site in sites for weight in site.weights]
    if theirs != ours:
        first = next((pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]), (len(theirs), len(ours)))
        raise PlanError(
            f"the plan is for {plan.model}, where {first[0]} stands",
            f"{first[1]}, as this model has it",
            "Use the plan with the model it was made for, or allocate again.",
        )
    changed = {weight.name for weight in plan.weights if weight.form != "dense"}
    return tuple(site for site in sites if any(weight.name in changed for weight in site.weights))


def build_modules(
    model: nn.Module,
    weights: Sequence[WeightChoice],
    sites: Sequence[Site],
    stream: Iterator[tuple[int, LayerFactors]],
    method: Method,
) -> dict[str, nn.Module]:
    """The new module of every weight that changes, by name; the model itself is not touched.

    Args:
        weights: what every weight becomes.
        sites: all that change, such as those of ``changed_sites``.
        stream: their factors, layer by layer.

    Raises:
        ModelError: a statistic is not finite.
    """
    choices = {choice.name: choice for choice in weights}
    modules: dict[str, nn.Module] = {}
    for layer, factors in stream:
        for site in (site for site in sites if site.layer == layer):
            work = _Work(model, site, [choices[weight.name] for weight in site.weights], factors, method)
            for weight, choice in zip(site.weights, work.choices, strict=True):
                if parameters := BUILDERS[form_named(choice.form).kind](work, weight, choice):
                    modules[choice.name] = _filled(work.linear(weight), choice, parameters)
    return modules


def swap_in(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Replace each named submodule."""
    for name, module in modules.items():
        model.set_submodule(name, module)


@dataclass(frozen=True)
class _Work:
    """One site being compressed."""

    model: nn.Module
    site: Site
    choices: Sequence[WeightChoice]
    factors: LayerFactors
    method: Method

    def linear(self, weight: Weight) -> nn.Linear:
        return linear_at(self.model, weight.name)

    def metric(self, weight: Weight) -> Metric:
        return self.method.metric(self.factors.moments(weight))

    @cached_property
    def kept(self) -> Tensor:
        """The neurons that stay, shared by the site's weights."""
        pairs = zip(self.site.weights, self.choices, strict=True)
        down, choice = next(pair for pair in pairs if pair[0].neurons == "in")
        return self.factors.kept(down, choice.dim)

    @cached_property
    def values(self) -> ShortenedValues:
        """The directions in which the value vectors go, shared by v_proj and o_proj."""
        values, output = (next(one for one in self.site.weights if one.values == side) for side in ("out", "in"))
        return shortened(self.model, self.method, values, output, self.metric)


def _dense(work: _Work, weight: Weight, choice: WeightChoice) -> dict[str, Tensor]:
    return {}


def _low_rank(work: _Work, weight: Weight, choice: WeightChoice) -> dict[str, Tensor]:
    return _pair(work, weight, *work.factors.low_rank(weight, choice.dim))


def _grouped(work: _Work, weight: Weight, choice: WeightChoice) -> dict[str, Tensor]:
    return _pair(work, weight, *work.factors.grouped(weight, choice.dim))


def _pair(work: _Work, weight: Weight, second: Tensor, first: Tensor) -> dict[str, Tensor]:
    bias = work.linear(weight).bias
    return {"first.weight": first, "second.weight": second} | ({} if bias is None else {"second.bias": bias})


def _narrow(work: _Work, weight: Weight, choice: WeightChoice) -> dict[str, Tensor]:
    linear = work.linear(weight)
    if weight.neurons == "out":
        blocks = range(0, weight.out_features, weight.out_features // weight.blocks)
        rows = torch.cat([start + work.kept for start in blocks])
        bias = {} if linear.bias is None else {"bias": linear.bias[rows]}
        return {"weight": linear.weight[rows]} | bias
    bias = {} if linear.bias is None else {"bias": linear.bias}
    return {"weight": compensated(linear.weight, work.kept, work.metric(weight))} | bias


def _head_dim(work: _Work, weight: Weight, choice: WeightChoice) -> dict[str, Tensor]:
    linear = work.linear(weight)
    if weight.values == "out":
        bias = {} if linear.bias is None else {"bias": work.values.values(linear.bias, choice.dim)}
        return {"weight": work.values.values(linear.weight, choice.dim)} | bias
    bias = {} if linear.bias is None else {"bias": linear.bias}
    return {"weight": work.values.outputs(choice.dim, work.metric(weight))} | bias


# A form's parameters for one weight; empty where the weight stays as it is.
BUILDERS: Mapping[str, Callable[[_Work, Weight, WeightChoice], dict[str, Tensor]]] = MappingProxyType(
    {"dense": _dense, "low_rank": _low_rank, "narrow": _narrow, "head_dim": _head_dim, "grouped": _grouped}
)


def _filled(linear: nn.Linear, choice: WeightChoice, parameters: dict[str, Tensor]) -> nn.Module:
    reference = linear.weight
    module = empty_module(choice, bias=linear.bias is not None, device=reference.device, dtype=reference.dtype)
    with torch.no_grad():
        module.load_state_dict({name: value.detach().to(reference.dtype) for name, value in parameters.items()})
    return module.train(linear.training).requires_grad_(reference.requires_grad)
