"""Small compressed mixtures of experts, whose layers keep different numbers of experts."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from gac.checkpoint.planned import attach_plan
from gac.compression.apply import empty_stored
from gac.forms.planned_sites import targeted_sites
from gac.models.families import family_of
from gac.models.linears import as_linear
from gac.runtime.modules import resized
from gac.runtime.storage.experts import rounded
from gac.runtime.storage.modules import stored_modules
from gac.runtime.vllm.check import FEWER_EXPERTS
from gac.schemes import Scheme, scheme_named
from gac.schemes.base import storage_of
from tests.changed import edited, with_measured
from tests.compression.compressed import MakePlan, share_inputs
from tests.compression.stored import in_schemes
from tests.models.small import EXPERTS, small_config, small_model, with_random_mlps
from tests.serving.engine import Request, generate_from, prompts

LAYERS, COUNTS = 4, (5, 8, 3, 6)
"""Experts by layer, of eight."""


_ODD = {"glm4_moe": {"head_dim": 32}, "gpt_oss": {"intermediate_size": 64}}
"""What vLLM's classes need besides: a size that transformers works out, and multiples of 32 where it pads none."""


def mixture(model_type: str, **changed: Any) -> Any:
    """Make a small dense mixture."""
    sizes = {"hidden_size": 128, "num_hidden_layers": LAYERS} | changed
    config = small_config(model_type, **sizes)
    for name, value in _ODD.get(model_type, {}).items():
        setattr(config, name, value)
    return with_random_mlps(small_model(config), 0, 0.1)


def changes(config: Any, counts: Sequence[int] = COUNTS) -> dict[str, tuple[str, int]]:
    """Fewer experts where vLLM runs them; pairs of attention in every other layer; narrower MLPs and shared experts."""
    chosen = experts_alone(config, counts) if config.model_type in FEWER_EXPERTS else {}
    for site in family_of(config).sites(config):
        for weight in site.weights:
            if weight.neurons:
                if site.layer in (0, 2):
                    chosen[weight.name] = ("narrow", 32)
            elif site.layer % 2:
                chosen[weight.name] = ("low_rank", 16)
    return chosen


def experts_alone(config: Any, counts: Sequence[int] = COUNTS) -> dict[str, tuple[str, int]]:
    """Fewer experts where these can go."""
    fewer = [site for site in targeted_sites(config, ("experts",)) if counts[site.layer] < EXPERTS]
    routed = [(weight.name, site.layer) for site in fewer for weight in site.weights if weight.is_routed]
    return {name: ("experts", counts[layer]) for name, layer in routed}


def in_fp8(config: Any) -> dict[str, str]:
    """Experts in every other layer, and attention in every third one."""
    weights = [(site.layer, each) for site in targeted_sites(config, ("experts",)) for each in site.weights]
    stored = [each for layer, each in weights if (layer % 2 if each.experts else layer % 3 and not each.neurons)]
    return {each.name: "fp8" for each in stored if each.experts or not each.is_routed}


def mixed(
    model: Any,
    make_plan: MakePlan,
    chosen: dict[str, tuple[str, int]],
    schemes: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Compress a mixture: its first experts stay as they are, or as they are rounded; other new weights are random."""
    plan = in_schemes(with_measured(make_plan(model.config, chosen), family=model.config.model_type), schemes)
    torch.manual_seed(1)
    for choice in plan.weights:
        dense: Any = model.get_submodule(choice.name)
        if choice.weight.is_routed and choice.changed:
            module = dense
            if choice.form == "experts":
                module = resized(dense, **choice.module.sizes)
                for name, values in dense.state_dict().items():
                    module.state_dict()[name].copy_(values[: choice.module.sizes["experts"]])
            if (storage := storage_of(scheme := scheme_named(choice.scheme))) is not None:
                module = rounded(storage, module, partial(_as_stored, scheme))
            model.set_submodule(choice.name, module)
        elif choice.changed:
            module = empty_stored(choice, as_linear(dense).bias is not None, "cpu", model.dtype)
            for values in module.parameters():
                nn.init.normal_(values, std=0.1)
            for matrix in stored_modules(module).values():
                matrix.fill(scheme_named(choice.scheme).stored(0.1 * torch.randn(matrix.matrix)))
            model.set_submodule(choice.name, module)
    return attach_plan(share_inputs(model, plan.recipe.space.forms, False), plan).eval()


def _as_stored(scheme: Scheme, _matrix: str, _expert: int, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return scheme.stored(values)


def saved(model: Any, folder: Path, **options: Any) -> Request:
    """Save a model in float32, with what ``generate`` says of six prompts."""
    model.float().save_pretrained(folder)
    some = prompts()[::4]
    tokens, logprobs, rows = zip(*(generate_from(model, input_ids=torch.tensor([ids])) for ids in some), strict=True)
    expected = {"tokens": [*tokens], "logprobs": [*logprobs], "rows": [*rows]}
    return Request(folder, options, expected, prompts=some)


def saved_narrower(model: Any, widths: Sequence[int], folder: Path) -> Request:
    """Save a mixture whose experts have, by layer, the first neurons alone; ``config.json`` says so."""
    stacks = {name: module for name, module in model.named_modules() if hasattr(module, "gate_up_proj")}
    for (name, stack), width in zip(stacks.items(), widths, strict=True):
        narrower = resized(stack, experts=len(stack.down_proj), width=width)
        gate, up = stack.gate_up_proj.data.chunk(2, 1)
        narrower.gate_up_proj.data.copy_(torch.cat([gate[:, :width], up[:, :width]], 1))
        narrower.down_proj.data.copy_(stack.down_proj.data[..., :width])
        model.set_submodule(name, narrower)
    request = saved(model, folder)
    with edited(folder / "config.json") as config:
        for (name, stack), width in zip(stacks.items(), widths, strict=True):
            sizes = {"experts": len(stack.down_proj), "width": width}
            module = {"form": "experts", "dim": sizes["experts"], "module": "Experts", "sizes": sizes}
            config["gac"]["modules"][name] = module
    return request
