"""From a plan to modules in the model: which one each weight becomes, built, swapped in, sharing first GEMMs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from gac.core.errors import PlanError
from gac.forms import form_named
from gac.forms.planned_sites import as_planned
from gac.forms.tensors import Kept, SiteWork, Statistics
from gac.measurement.calibration import CalibrationRun
from gac.models.families import family_of
from gac.models.sites import Site, Weight
from gac.plan.plan import Plan, WeightChoice
from gac.runtime.finish import Description
from gac.runtime.storage.modules import store_in
from gac.schemes import scheme_named
from gac.schemes.storages import storage_of


def empty_module(choice: WeightChoice, bias: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """The module of a weight's form at its dim; arguments as for ``TensorForm.empty``."""
    return form_named(choice.form).tensors.empty(choice.weight, choice.dim, bias, device, dtype)


def empty_stored(choice: WeightChoice, bias: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """The same with its matrices in the storage of the weight's scheme."""
    module, storage = empty_module(choice, bias, device, dtype), storage_of(scheme_named(choice.scheme))
    return module if storage is None else store_in(storage, module)


def merged(choice: WeightChoice, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The dense ``weight (out, in)``, and ``bias (out,)`` where there is one, of the same function up to rounding.

    Args:
        own: the parameters of the weight's module, by their names in it, none in a storage.
    """
    return form_named(choice.form).tensors.merge(choice.weight, choice.dim, own)


def planned_sites(plan: Plan, sites: Sequence[Site]) -> tuple[Site, ...]:
    """A family's sites as the plan decides on them, fused where it has them so."""
    shared = {choice.site for choice in plan.sites if choice.shared}
    planned = as_planned(sites, plan.recipe.space.forms, plan.recipe.deployment.fuse)
    found = (site.run(site.name in shared) if site.either else site for site in planned)
    return where_they_run(tuple(found), plan.weights)


def where_they_run(sites: Sequence[Site], weights: Sequence[WeightChoice]) -> tuple[Site, ...]:
    """The same sites; those whose weights are not run, or lie in storages that differ, are not marked as fused."""
    by_name = {choice.name: choice for choice in weights}

    def alike(site: Site) -> bool:
        chosen = [by_name[site.weights[at].name] for at in site.fused]
        return all(map(runs, chosen)) and len({one.scheme for one in chosen}) == 1

    return tuple(site.run(shared=False) if site.fused and not alike(site) else site for site in sites)


def runs(choice: WeightChoice) -> bool:
    """Whether anything is multiplied by what the weight became."""
    return form_named(choice.form).params(choice.weight, choice.dim) > 0


def skipped_blocks(config: Any, weights: Sequence[WeightChoice]) -> list[dict[str, Any]]:
    """The attentions and MLPs in which nothing is multiplied, as ``Description`` has them."""
    family = family_of(config)
    found = []
    for choice in weights:
        if choice.weight.block == "in" and not runs(choice):
            block, _, output = choice.name.rpartition(".")
            attention = choice.name.endswith(f".{family.output}")
            found.append({"block": block, "output": output, "norms": family.norms_of(block), "attention": attention})
    return found


def shared_names(sites: Sequence[Site]) -> tuple[tuple[str, ...], ...]:
    """The names of the weights of each site whose first GEMMs run as one."""
    groups = (tuple(site.weights[at].name for at in site.fused) for site in sites)
    return tuple(names for names in groups if len(names) > 1)


def rounded_inputs(config: Any, weights: Sequence[WeightChoice]) -> list[dict[str, Any]]:
    """What makes the inputs of weights that round them, as ``Description`` has it."""
    rounding = {choice.name for choice in weights if scheme_named(choice.scheme).reads}
    return [asdict(made) for made in family_of(config).made(config) if not rounding.isdisjoint(made.readers)]


def describe(config: Any, sites: Sequence[Site], weights: Sequence[WeightChoice]) -> Description:
    """Return how a model with these weights runs, for ``finish``.

    Args:
        sites: from ``planned_sites``, which marks those whose weights share a GEMM.
    """
    return Description(shared_names(sites), skipped_blocks(config, weights), rounded_inputs(config, weights))


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
    """The new module of every weight that changes, by name, as yet in 16 bits; the model itself is not touched.

    Of several processes each builds some layers, and gives them to the others.

    Args:
        weights: what every weight becomes.
        sites: all that change, such as those of ``changed_sites``.
        stream: what calibration has kept, layer by layer.

    Raises:
        ModelError: a statistic is not finite.
    """
    choices = {choice.name: choice for choice in weights}
    modules: dict[str, nn.Module] = {}
    for turn, (layer, kept) in enumerate(stream):
        if not run.ranks.owns(turn):
            continue
        statistics = Statistics(run.model, kept.moments, run.method, kept)
        for site in (site for site in sites if site.layer == layer):
            work = SiteWork(site.weights, kept, statistics)
            for weight in site.weights:
                if module := _module(work, weight, choices[weight.name]):
                    modules[weight.name] = module
    return run.ranks.modules(modules)


def _module(work: SiteWork, weight: Weight, choice: WeightChoice) -> nn.Module | None:
    """What runs a weight, not rounded yet; None where it stays as it is."""
    parameters, linear = form_named(choice.form).tensors.parameters(work, weight, choice.dim), work.linear(weight)
    if parameters is None and scheme_named(choice.scheme).lossy:
        parameters = dict(linear.named_parameters())
    return None if parameters is None else _filled(linear, choice, parameters)


def _filled(linear: nn.Linear, choice: WeightChoice, parameters: dict[str, Tensor]) -> nn.Module:
    reference = linear.weight
    module = empty_module(choice, bias=linear.bias is not None, device=reference.device, dtype=reference.dtype)
    with torch.no_grad():
        module.load_state_dict({name: _in_dtype(value.detach(), reference.dtype) for name, value in parameters.items()})
    return module.train(linear.training).requires_grad_(reference.requires_grad)


def _in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Indices stay whole numbers."""
    return value.to(dtype) if value.is_floating_point() else value
