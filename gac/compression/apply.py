"""Plan and factors to a smaller model: every module is built before the first one is swapped in."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gac.compression.modules import empty_module
from gac.errors import PlanError
from gac.forms import form_named
from gac.forms.tensors import Kept, SiteWork, Statistics
from gac.models.sites import Site
from gac.models.weights import Weight
from gac.plan import Plan, WeightChoice
from gac.schemes import scheme_named
from gac.sensitivity.calibration import CalibrationRun


def changed_sites(plan: Plan, sites: Sequence[Site]) -> tuple[Site, ...]:
    """The sites that the plan changes, in model order.

    Args:
        sites: the model's own, from its family.

    Raises:
        PlanError: the plan's weights are not the model's.
    """
    theirs = [(one.weight.name, one.weight.out_features, one.weight.in_features) for one in plan.weights]
    ours = [(weight.name, weight.out_features, weight.in_features) for site in sites for weight in site.weights]
    if theirs != ours:
        first = next((pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]), (len(theirs), len(ours)))
        raise PlanError(
            f"the plan is for {plan.measured.model}, where {first[0]} stands",
            f"{first[1]}, as this model has it",
            "Use the plan with the model it was made for, or allocate again.",
        )
    changed = {weight.name for weight in plan.weights if weight.changed}
    return tuple(site for site in sites if any(weight.name in changed for weight in site.weights))


def build_modules(
    run: CalibrationRun, weights: Sequence[WeightChoice], sites: Sequence[Site], stream: Iterator[tuple[int, Kept]]
) -> dict[str, nn.Module]:
    """The new module of every weight that changes, by name; the model itself is not touched.

    Args:
        weights: what every weight becomes.
        sites: all that change, such as those of ``changed_sites``.
        stream: what calibration has kept, layer by layer.

    Raises:
        ModelError: a statistic is not finite.
    """
    choices = {choice.name: choice for choice in weights}
    modules: dict[str, nn.Module] = {}
    for layer, kept in stream:
        statistics = Statistics(run.model, kept.moments, run.method)
        for site in (site for site in sites if site.layer == layer):
            work = SiteWork(site.weights, kept, statistics)
            for weight in site.weights:
                if module := _module(work, weight, choices[weight.name]):
                    modules[weight.name] = module
    return modules


def _module(work: SiteWork, weight: Weight, choice: WeightChoice) -> nn.Module | None:
    """What runs a weight; None where it stays as it is."""
    parameters = form_named(choice.form).tensors.parameters(work, weight, choice.dim)
    scheme, linear = scheme_named(choice.scheme), work.linear(weight)
    if scheme.lossy:
        own = parameters or dict(linear.named_parameters())
        parameters = {name: _in_dtype(value, linear.weight.dtype) for name, value in own.items()}
        parameters |= {name: scheme.rounded(value) for name, value in parameters.items() if value.dim() > 1}
    return _filled(linear, choice, parameters) if parameters else None


def swap_in(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Replace each named submodule."""
    for name, module in modules.items():
        model.set_submodule(name, module)


def _filled(linear: nn.Linear, choice: WeightChoice, parameters: dict[str, Tensor]) -> nn.Module:
    reference = linear.weight
    module = empty_module(choice, bias=linear.bias is not None, device=reference.device, dtype=reference.dtype)
    with torch.no_grad():
        module.load_state_dict({name: _in_dtype(value.detach(), reference.dtype) for name, value in parameters.items()})
    return module.train(linear.training).requires_grad_(reference.requires_grad)


def _in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Indices stay whole numbers."""
    return value.to(dtype) if value.is_floating_point() else value
