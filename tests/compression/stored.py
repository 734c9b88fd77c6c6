"""Small models in which forms and schemes are mixed, as ``gac.compress`` returns them, with random weights."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from gac.checkpoint.planned import attach_plan
from gac.compression.apply import describe, empty_stored, planned_sites
from gac.forms import form_named
from gac.models.families import family_of
from gac.models.linears import as_linear
from gac.models.sites import Weight
from gac.plan.plan import Plan
from gac.runtime.finish import finish
from gac.runtime.storage.modules import stored_modules
from gac.schemes import SCHEMES as KNOWN
from gac.schemes import scheme_named
from tests.changed import with_measured, with_recipe
from tests.compression.compressed import MakePlan
from tests.models.small import small_config, small_model

CHOOSY = tuple(name for name in KNOWN.names if scheme_named(name).input_quantiser)  # which take some dims alone
GROUPED = {"w3a16": "w3a16:32", "w2a16": "w2a16:24"}
SCHEMES = tuple(GROUPED.get(name, name) for name in KNOWN.names if name not in CHOOSY)
RANK, WIDTH, LENGTH = 10, 90, 10  # no multiples of what a word holds
PATTERNS = 4


def config_of(model_type: str) -> Any:
    """A few layers of every pattern of forms for each scheme, in 16 bits, and one for each scheme that is choosy."""
    config = small_config(model_type, num_hidden_layers=PATTERNS * len(SCHEMES) + len(CHOOSY))
    config.dtype = torch.bfloat16
    return config


def mixed(config: Any) -> dict[str, tuple[str, int, str]]:
    """By weight its form, dim and scheme: every form that the architecture can have, each in every scheme."""
    found = {}
    for turn, layers in groupby(family_of(config).sites(config), key=lambda site: site.layer // PATTERNS):
        weights = [(weight, site.layer % PATTERNS) for site in layers for weight in site.weights]
        if turn == len(SCHEMES):
            found |= {weight.name: _choosy(weight, CHOOSY[layer]) for weight, layer in weights}
            continue
        for at, (weight, pattern) in enumerate(weights):
            found[weight.name] = (*_form_of(weight, pattern), SCHEMES[(turn + at) % len(SCHEMES)])
    return found


def _choosy(weight: Weight, scheme: str) -> tuple[str, int, str]:
    """A pair or the dense weight in the scheme where it takes that, else as it is."""
    dense = form_named("dense")
    for form, dim in ((form_named("low_rank"), 16), (dense, dense.full(weight))):
        if all(map(scheme_named(scheme).supports, form.latency.gemms(weight, dim, 1))) and (
            form is dense or weight.to_residual
        ):
            return form.name, dim, scheme
    return dense.name, dense.full(weight), "bf16"


def _form_of(weight: Weight, pattern: int) -> tuple[str, int]:
    wanted: list[tuple[str, int]] = []
    if pattern == 0:
        wanted = [("latent:1", 6), ("low_rank", RANK)]
    elif pattern == 1:
        wanted = [(f"narrow_pair:{WIDTH}", RANK)] if weight.neurons == "in" else [("narrow", WIDTH)]
        wanted.append(("head_dim", LENGTH))
    elif pattern == 2:
        wanted = [("heads", 1)]
    elif weight.neurons is None:
        wanted = [("skip", 0)]
    return first_that_takes(weight, wanted)


def first_that_takes(weight: Weight, forms: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """The first of these forms and dims that the weight can have, or dense."""
    dense = "dense", form_named("dense").full(weight)
    return next((one for one in forms if form_named(one[0]).applies_to(weight)), dense)


def in_schemes(plan: Plan, schemes: Mapping[str, str]) -> Plan:
    """The plan with weights in these schemes, by name."""
    sites = tuple(
        replace(site, weights=tuple(replace(one, scheme=schemes.get(one.name, one.scheme)) for one in site.weights))
        for site in plan.sites
    )
    return replace(plan, sites=sites)


def stored(model: Any, make_plan: MakePlan, chosen: Mapping[str, tuple[str, int, str]], fused: bool = False) -> Any:
    """The model with these forms, dims and schemes, in place; weights that change are random, the plan is with it."""
    config = model.config
    plan = make_plan(config, {name: one[:2] for name, one in chosen.items() if one[0] != "dense"})
    plan = in_schemes(with_recipe(plan, fuse=fused), {name: one[2] for name, one in chosen.items()})
    plan = with_measured(plan, family=config.model_type)
    torch.manual_seed(1)
    for choice in (choice for choice in plan.weights if choice.changed):
        dense: Any = as_linear(model.get_submodule(choice.name))
        module = empty_stored(choice, dense.bias is not None, "cpu", model.dtype)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.1)
        for one in stored_modules(module).values():
            one.fill({name: held.clone() for name, held in _random(choice.scheme, *one.matrix).items()})
        model.set_submodule(choice.name, module)
    finish(model, describe(config, planned_sites(plan, family_of(config).sites(config)), plan.weights))
    return attach_plan(model, plan).eval()


@cache
def _random(scheme: str, rows: int, columns: int) -> dict[str, Tensor]:
    """A random matrix as it is stored, the same for all of its shape: rounding takes longer than all the rest."""
    matrix = 0.1 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    return scheme_named(scheme).stored(matrix.bfloat16())


def stored_model(model_type: str, make_plan: MakePlan, **options: Any) -> Any:
    """Of an architecture, all forms and schemes mixed."""
    config = config_of(model_type)
    return stored(small_model(config), make_plan, mixed(config), **options)


def held_bytes(tensors: Mapping[str, Tensor], plan: Plan) -> int:
    """Bytes of the tensors that hold the matrices of a plan's weights; ``weight_shape`` says their sizes alone."""
    prefixes, beside = tuple(f"{choice.name}." for choice in plan.weights), ("bias", "weight_shape")
    return sum(one.nbytes for name, one in tensors.items() if name.startswith(prefixes) and not name.endswith(beside))
