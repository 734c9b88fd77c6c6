"""Small compressed models of any family, with random modules of many forms in them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from gac.checkpoint.planned import attach_plan
from gac.compression.apply import empty_module, shared_names
from gac.forms.planned_sites import as_planned
from gac.models.families import family_of
from gac.models.linears import as_linear
from gac.plan.plan import Plan
from gac.runtime.finish import Description, finish
from tests.changed import with_measured, with_recipe
from tests.models.small import small_config, small_model

MakePlan = Callable[[Any, Mapping[str, tuple[str, int]]], Plan]
RANK, WIDTH, HEAD_DIM = 16, 96, 8


def changes_of(config: Any) -> dict[str, tuple[str, int]]:
    """Low rank in the first layer; a narrower MLP in the second, its first weight a pair, and shorter values."""
    found = {}
    for site in family_of(config).sites(config):
        for weight in site.weights:
            if site.layer == 0:
                found[weight.name] = ("low_rank", RANK)
            elif weight.neurons:
                found[weight.name] = ("narrow", WIDTH) if weight != site.weights[0] else (f"narrow_pair:{WIDTH}", RANK)
            elif weight.values:
                found[weight.name] = ("head_dim", HEAD_DIM)
    return found


def share_inputs(model: Any, forms: Sequence[str] = (), fused: bool = True) -> Any:
    """The model, in place, with one GEMM of all weights that read one input."""
    sites = as_planned(family_of(model.config).sites(model.config), forms, fused)
    finish(model, Description(shared_names(sites)), kernels=False)
    return model


def compressed(
    model: PreTrainedModel, make_plan: MakePlan, changes: Mapping[str, tuple[str, int]], fused: bool = False
) -> Any:
    """The model with those changes, in place; its new weights are random, its plan is with it."""
    plan = with_recipe(make_plan(model.config, changes), fuse=fused)
    plan = with_measured(plan, family=model.config.model_type)
    torch.manual_seed(1)
    for choice in plan.weights:
        if choice.form != "dense":
            dense: Any = as_linear(model.get_submodule(choice.name))
            module = empty_module(choice, dense.bias is not None, "cpu", model.dtype)
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
            model.set_submodule(choice.name, module)
    return attach_plan(share_inputs(model, plan.recipe.space.forms, fused), plan).eval()


def small_compressed(model_type: str, make_plan: MakePlan, fused: bool = False) -> Any:
    """A small compressed model of an architecture."""
    config = small_config(model_type)
    return compressed(small_model(config), make_plan, changes_of(config), fused)
