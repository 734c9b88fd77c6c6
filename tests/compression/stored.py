"""Small models in which forms and schemes are mixed, as ``gac.compress`` returns them, with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from gac.checkpoint.attach import attach_plan
from gac.compression.apply import empty_module, planned_sites, share_gemms, skip_absent
from gac.compression.rounding import store
from gac.forms import form_named
from gac.models.families import family_of, supported
from gac.models.linears import as_linear
from gac.models.sites import Weight
from gac.plan import Plan
from gac.schemes import scheme_named
from tests.changed import with_measured, with_recipe
from tests.models.small import small_config, small_model, weights_of

MakePlan = Callable[[Any, Mapping[str, tuple[str, int]]], Plan]
SCHEMES = ("w8a16", "w4a16", "w3a16:32", "w2a16:16", "w4a16:24", "bf16")
RANK, WIDTH = 10, 90  # no multiples of what a word holds


def config_of(model_type: str) -> Any:
    return small_config(model_type, num_hidden_layers=4)


def mixed_forms(config: Any) -> dict[str, tuple[str, int]]:
    """Every form that the architecture can have; layers are alike but for that."""
    found = {}
    for layer, weights in groupby(
        weights_of(config), key=lambda weight: weight.name.split(".layers.")[-1].split(".")[0]
    ):
        for weight in weights:
            found[weight.name] = _form_of(weight, int("".join(filter(str.isdigit, layer)) or 0))
    return {name: chosen for name, chosen in found.items() if chosen[0] != "dense"}


def _form_of(weight: Weight, layer: int) -> tuple[str, int]:
    def first(*wanted: tuple[str, int]) -> tuple[str, int]:
        return next((one for one in wanted if form_named(one[0]).takes(weight)), ("dense", 0))

    if layer == 0:
        return first(("grouped:1", 6), ("low_rank", RANK))
    if layer == 1:
        pair = (f"narrow_pair:{WIDTH}", RANK)
        return first(*([pair] if weight.neurons == "in" else []), ("narrow", WIDTH), ("head_dim", 10))
    if layer == 2:
        return first(("heads", 1))
    return first(("skip", 0)) if weight.neurons is None else ("dense", 0)


def stored_plan(config: Any, make_plan: MakePlan, first: int = 0, fused: bool = False) -> Plan:
    """Every weight in the next of the schemes.

    Args:
        first: where to begin among them.
    """
    plan = with_recipe(make_plan(config, mixed_forms(config)), fuse=fused)
    names = [one.name for one in plan.weights]
    scheme = {name: SCHEMES[(first + at) % len(SCHEMES)] for at, name in enumerate(names)}
    sites = tuple(
        replace(site, weights=tuple(replace(one, scheme=scheme[one.name]) for one in site.weights))
        for site in plan.sites
    )
    return with_measured(replace(plan, sites=sites), family=config.model_type)


def stored_model(
    model_type: str, make_plan: MakePlan, dtype: torch.dtype = torch.bfloat16, fused: bool = False
) -> tuple[Any, dict[str, dict[str, torch.Tensor]]]:
    """The model with its plan, and by weight what its module holds as rounded numbers of the dtype."""
    config = config_of(model_type)
    config.dtype = dtype
    model: Any = small_model(config)
    plan = stored_plan(config, make_plan, supported().index(model_type), fused)
    torch.manual_seed(1)
    for choice in (choice for choice in plan.weights if choice.changed):
        dense: Any = as_linear(model.get_submodule(choice.name))
        module = empty_module(choice, dense.bias is not None, "cpu", dtype)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.set_submodule(choice.name, store(scheme_named(choice.scheme), module))
    share_gemms(model, planned_sites(plan, family_of(config).sites(config)))
    skip_absent(model, plan.weights)
    return attach_plan(model, plan).eval(), plan
