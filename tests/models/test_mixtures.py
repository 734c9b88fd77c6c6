"""Mixtures of experts: attention, dense layers and shared experts are compressed; what routes stays bit for bit."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gac
from gac.models.families import family_of
from gac.runtime.architectures import factory_of
from tests.compression.applying import IDS, logits
from tests.models.small import MIXTURES, linear_weights, small_config, small_model, weights_of
from tests.models.test_wrappers import CODE
from tests.small_pipeline import Small, has_state, state_of

FEW = ("granitemoeshared", "gpt_oss", "qwen2_moe")
"""A factor and a shared expert beside the block; biases, sinks and transposed experts; a shared expert with a gate."""
mixtures = pytest.mark.parametrize(
    "model_type", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES if name not in FEW)]
)


def deep(model_type: str) -> Any:
    """Four layers, so that some can be skipped."""
    return small_model(small_config(model_type, num_hidden_layers=4))


def in_layers(model: Any) -> dict[str, tuple[str, nn.Module]]:
    """Every module of the decoder layers by its name, with the name in its layer."""
    layers = re.escape(family_of(model.config).layers)
    matches = ((name, re.match(rf"{layers}\.\d+\.(.+)", name), module) for name, module in model.named_modules())
    return {name: (match[1], module) for name, match, module in matches if match}


@mixtures
def test_the_sites_are_the_linear_layers_outside_of_experts_and_routers(model_type: str) -> None:
    config = small_config(model_type)
    sizes = {weight.name: (weight.out_features, weight.in_features) for weight in weights_of(config)}
    assert sizes == linear_weights(small_model(config))


@mixtures
def test_parameters_of_routed_experts_follow_from_the_config(model_type: str) -> None:
    config = small_config(model_type)
    model, family = small_model(config), family_of(config)
    stacks = [module for path, module in in_layers(model).values() if path == family.experts.stack]
    counted = family.routed_params(config)
    assert counted.params == sum(values.numel() for stack in stacks for values in stack.parameters())
    assert counted.active * 8 == counted.params * 2
    assert len(family.routing_blocks(config)) == len(stacks)
    assert all(model.get_submodule(name) is not None for name in family.routing_blocks(config).values())


@mixtures
def test_the_pipeline_leaves_experts_and_routers_alone(model_type: str, small: Small, tmp_path: Path) -> None:
    dense = deep(model_type)
    before = {name: values.clone() for name, values in dense.state_dict().items()}
    fitting = {"narrow": [w.neurons for w in weights_of(dense.config)], "skip": [w.block for w in weights_of(dense.config)]}
    forms = ("low_rank", *(form for form, sides in fitting.items() if any(sides)))
    plan = small.allocate(0.6, model=dense, forms=forms, schemes=("bf16", "w8a16"))
    model: Any = small.compress(plan, model=dense)
    gac.save(model, tmp_path / "saved")
    loaded: Any = gac.load(tmp_path / "saved", verify=True)
    assert has_state(loaded, state_of(model))
    torch.testing.assert_close(logits(loaded), logits(model))  # grouped GEMMs round by where tensors lie in memory
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(IDS, **options), loaded.generate(IDS, use_cache=False, **options))

    targeted = tuple(f"{weight.name}." for weight in weights_of(dense.config))
    refitted = f"{family_of(dense.config).last_norm}."  # which makes up for all layers
    left = {name for name in before if not name.startswith((*targeted, refitted))}
    stack = family_of(dense.config).experts.stack
    assert any(f".{stack}." in name for name in left)
    read = loaded.state_dict()
    assert all(torch.equal(read[name], before[name]) for name in left)

    subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "saved"), factory_of(type(dense.config)).__name__], check=True, cwd=tmp_path
    )
    torch.testing.assert_close(torch.load(tmp_path / "saved/logits.pt"), logits(model))
