"""From a plan to modules in the model: which one each weight becomes, built, swapped in, sharing first GEMMs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gac.core.errors import PlanError
from gac.forms import form_named
from gac.forms.experts.elimination import Routing
from gac.forms.experts.moments import rounded_to
from gac.forms.experts.torch import kept_tokens
from gac.forms.planned_sites import as_planned
from gac.forms.tensors import SiteBuild, Statistics, tensors_of
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import LayerFit
from gac.models.families import family_of
from gac.models.sites import Site, Weight
from gac.models.streaming import on_its_device
from gac.plan.plan import Plan, WeightChoice
from gac.runtime.finish import Description, QuantisedInputs, Skipped
from gac.runtime.modules import resized
from gac.runtime.storage.modules import store_in
from gac.schemes import scheme_named
from gac.schemes.base import storage_of


def empty_module(choice: WeightChoice, bias: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """The module of a weight's form at its dim, not initialised; arguments as for ``TensorForm.empty``."""
    return tensors_of(form_named(choice.form)).empty(choice.weight, choice.dim, bias, device, dtype)


def empty_stored(choice: WeightChoice, bias: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    module, storage = empty_module(choice, bias, device, dtype), storage_of(scheme_named(choice.scheme))
    return module if storage is None else store_in(storage, module)


def merged(choice: WeightChoice, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return tensors_of(form_named(choice.form)).merge(choice.weight, choice.dim, parameters)


def planned_sites(plan: Plan, sites: Sequence[Site]) -> tuple[Site, ...]:
    """A family's sites as the plan decides on them, fused where it has them so."""
    shared = {choice.site for choice in plan.sites if choice.shared}
    planned = as_planned(sites, plan.recipe.space.forms, plan.recipe.deployment.fuse)
    variants = (site.with_fusion(site.name in shared) if site.fusion_optional else site for site in planned)
    return where_they_run(tuple(variants), plan.weights)


def where_they_run(sites: Sequence[Site], weights: Sequence[WeightChoice]) -> tuple[Site, ...]:
    """The same sites; those whose weights are not run, or lie in storages that differ, are not marked as fused."""
    by_name = {choice.name: choice for choice in weights}

    def alike(site: Site) -> bool:
        names = [site.weights[index].name for index in site.fused]
        chosen = [by_name[name] for name in names if name in by_name]  # ``changed_sites`` refuses others
        return all(map(runs, chosen)) and len({choice.scheme for choice in chosen}) == 1

    return tuple(site.with_fusion(False) if site.fused and not alike(site) else site for site in sites)


def runs(choice: WeightChoice) -> bool:
    return form_named(choice.form).params(choice.weight, choice.dim) > 0


def skipped_blocks(config: Any, weights: Sequence[WeightChoice]) -> list[Skipped]:
    """The attentions and MLPs in which nothing is multiplied, as ``Description`` has them."""
    family = family_of(config)
    blocks: list[Skipped] = []
    for choice in weights:
        if choice.weight.block == "in" and not runs(choice):
            block, _, output = choice.name.rpartition(".")
            attention, norms = choice.name.endswith(f".{family.output}"), family.norms_of(config, block)
            blocks.append({"block": block, "output": output, "norms": norms, "attention": attention})
    return blocks


def shared_names(sites: Sequence[Site]) -> tuple[tuple[str, ...], ...]:
    groups = (tuple(site.weights[index].name for index in site.fused) for site in sites)
    return tuple(names for names in groups if len(names) > 1)


def rounded_inputs(config: Any, weights: Sequence[WeightChoice]) -> list[QuantisedInputs]:
    """List the norms that quantise inputs of weights, as ``gac.runtime.fusion.quantised_inputs`` takes them."""
    rounding = {choice.name for choice in weights if scheme_named(choice.scheme).input_quantiser}
    return [
        {"by": norm, "readers": readers}
        for norm, readers in family_of(config).norm_outputs(config)
        if not rounding.isdisjoint(readers)
    ]


def describe(config: Any, sites: Sequence[Site], weights: Sequence[WeightChoice]) -> Description:
    """Return how a model with these weights runs, for ``finish``; ``planned_sites`` marks sites that share a GEMM."""
    return Description(shared_names(sites), skipped_blocks(config, weights), rounded_inputs(config, weights))


def _shape(weight: Weight) -> str:
    return f"{weight.name} of {weight.out_features} x {weight.in_features}"


def changed_sites(plan: Plan, sites: Sequence[Site]) -> tuple[Site, ...]:
    """The sites of the model that the plan changes, in model order; the plan has to be for its weights."""
    theirs = [_shape(choice.weight) for choice in plan.weights]
    ours = [_shape(weight) for site in sites for weight in site.weights]
    if theirs != ours:
        first = next((pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]), None)
        planned, present = first or (f"{len(theirs)} weights", f"{len(ours)} weights")
        raise PlanError(
            f"the plan is for {plan.measured.model}, which has {planned}",
            f"{present}, as this model has",
            "Use the plan with the model it was made for, or allocate again.",
        )
    changed = {weight.name for weight in plan.weights if weight.changed}
    return tuple(site for site in sites if any(weight.name in changed for weight in site.weights))


def build_modules(
    run: CalibrationRun,
    weights: Sequence[WeightChoice],
    sites: Sequence[Site],
    fits: Mapping[int, LayerFit],
) -> dict[str, nn.Module]:
    """The new module of every weight that changes, by name; the model itself is not touched.

    All are in 16 bits as yet but routed experts, which nothing fits again.

    ``sites`` are those that change. Of several processes each builds some layers, and gives them to the others.
    """
    choices = {choice.name: choice for choice in weights}
    modules: dict[str, nn.Module] = {}
    for turn, (layer, fit) in enumerate(fits.items()):
        if not run.ranks.owns(turn):
            continue
        statistics = Statistics(run.model, fit.artifacts.moments, run.method, fit.artifacts)
        for site in (site for site in sites if site.layer == layer):
            work = SiteBuild(site.weights, statistics)
            for weight in site.weights:
                choice = choices[weight.name]
                module = _routed_module(work, choice, modules) if weight.is_routed else _module(work, weight, choice)
                if module:
                    modules[weight.name] = module
    return run.ranks.modules(modules)


def _module(work: SiteBuild, weight: Weight, choice: WeightChoice) -> nn.Module | None:
    linear = work.linear(weight)
    parameters = tensors_of(form_named(choice.form)).parameters(work, weight, choice.dim)
    if parameters is None:
        if not scheme_named(choice.scheme).lossy:
            return None
        parameters = dict(linear.named_parameters())
    dense = linear.weight
    module = empty_module(choice, bias=linear.bias is not None, device=dense.device, dtype=dense.dtype)
    module.load_state_dict(parameters)
    return module.train(linear.training).requires_grad_(dense.requires_grad)


def _routed_module(work: SiteBuild, choice: WeightChoice, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Build a router, or routed experts in their scheme; ``modules`` have the router before its experts."""
    weight, model, scheme = choice.weight, work.statistics.model, scheme_named(choice.scheme)
    parameters = tensors_of(form_named(choice.form)).parameters(work, weight, choice.dim)
    if parameters is None and not scheme.lossy:
        return None
    dense, router = (model.get_submodule(name) for name in (weight.name, work.weights[0].name))
    with on_its_device(dense), on_its_device(router):
        module: nn.Module = resized(dense, **choice.module.sizes)
        module.load_state_dict(dict(dense.named_parameters()) if parameters is None else parameters)
        if scheme.lossy:
            tokens = kept_tokens(work.artifacts, weight).to(next(module.parameters()).device)
            routing = Routing(modules.get(work.weights[0].name, router), tokens.inputs)
            module = rounded_to(scheme, module, routing, tokens)
    return module.train(dense.training).requires_grad_(next(dense.parameters()).requires_grad)
