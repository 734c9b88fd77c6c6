"""Models with layers of another kind than attention: the whole pipeline, and what their plans leave alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

import gac
from gac.core.errors import ModelError
from gac.core.workloads import Workload
from gac.models.experts import RoutedParams
from gac.models.families import family_of
from gac.models.rotation import rotates_freely
from gac.models.sites import Weight
from gac.plan.engines import steps_of
from gac.runtime.plain.modeling_gac import SkippedBlock
from tests.compression.applying import IDS, logits, with_dims
from tests.compression.compressed import MakePlan
from tests.models.small import TWO_KINDS, small_config, small_model, weights_of
from tests.small_pipeline import Small
from tests.without_gac import WithoutGac

GEMMA_4 = ("gemma4_text", "gemma4_unified_text")
"""With attentions of two kinds."""
two_kinds = pytest.mark.parametrize(
    "model_type",
    [
        name if name in ("granitemoehybrid", "lfm2") else pytest.param(name, marks=pytest.mark.slow)
        for name in TWO_KINDS
    ],
)
STATES = ("A_log", "D", "conv.conv.weight", "conv1d.weight", "dt_bias", "layer_scalar")
"""Endings of the parameters of state spaces and convolutions."""


def deep(model_type: str) -> Any:
    """Layers of each kind that can be skipped; Gemma's multiply what they return."""
    model = small_model(small_config(model_type, num_hidden_layers=4))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)
    return model


def saved_and_loaded(model: Any, folder: Path, without_gac: WithoutGac) -> Any:
    """What transformers reads with GAC, after the same was read without it."""
    gac.save(model, folder)
    loaded: Any = gac.load(folder, verify=True)
    assert torch.equal(logits(loaded), logits(model))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(IDS, **options), loaded.generate(IDS, use_cache=False, **options))
    without_gac.check(folder, model)
    return loaded


@two_kinds
@pytest.mark.parametrize("limits", [{"budget": 0.6}, {"budget": 0.9, "memory": 0.4}], ids=["forms", "schemes"])
def test_the_pipeline_changes_linear_weights_and_the_last_norm_alone(
    model_type: str, limits: dict[str, float], small: Small, without_gac: WithoutGac, tmp_path: Path
) -> None:
    model = deep(model_type)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    schemes = ("bf16", "w8a16", "w4a16:32") if "memory" in limits else ("bf16",)
    plan = small.allocate(model=model, forms=("low_rank", "narrow", "skip"), schemes=schemes, workloads=(), **limits)
    assert plan.recipe.refit == "residual"
    loaded = saved_and_loaded(small.compress(plan, model=model), tmp_path / "saved", without_gac)

    read, stored = loaded.state_dict(), load_file(tmp_path / "saved/model.safetensors")
    targeted = tuple(f"{weight.name}." for weight in weights_of(model.config))
    left = {name for name in before if not name.startswith((*targeted, f"{family_of(model.config).last_norm}."))}
    assert any(name.endswith(STATES) for name in left)
    for name in left:
        assert torch.equal(read[name], before[name])
        assert name not in stored or torch.equal(stored[name], before[name])


@pytest.mark.parametrize(
    "model_type",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in TWO_KINDS if name not in ("lfm2", "nemotron_h")), "lfm2"],
)
def test_a_mixer_that_is_skipped_keeps_its_states(
    model_type: str, make_plan: MakePlan, without_gac: WithoutGac, tmp_path: Path
) -> None:
    def without(weights: Sequence[Weight]) -> dict[str, tuple[str, int]]:
        last = next(w.name for w in weights if w.block == "in" and not w.neurons and not w.heads)
        return {w.name: ("skip", 0) for w in weights if w.name.startswith(f"{last.rpartition('.')[0]}.")}

    dense = deep(model_type)
    model = with_dims(deep(model_type), without, make_plan)
    loaded = saved_and_loaded(model, tmp_path / "saved", without_gac)
    (skipped,) = (name for name, module in loaded.named_modules() if isinstance(module, SkippedBlock))
    assert not torch.equal(logits(loaded), logits(dense))
    states = {name: values for name, values in dense.state_dict().items() if name.startswith(f"{skipped}.")}
    kept = {name: values for name, values in states.items() if name.endswith(STATES)}
    assert kept
    assert all(torch.equal(loaded.state_dict()[name], values) for name, values in kept.items())


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1", "granitemoehybrid", "lfm2", "qwen3_5_text"])
def test_no_norm_rounds_what_a_mixer_reads_for_it_masks_padding_first(model_type: str) -> None:
    config = small_config(model_type)
    readers = [name for _, names in family_of(config).norm_outputs(config) for name in names]
    assert readers
    assert not any(name.endswith(("in_proj", "out_proj", "in_proj_qkv")) for name in readers)


def test_granite_without_state_spaces_is_a_model_of_attention_alone() -> None:
    config = small_config("granitemoehybrid", layer_types=["full_attention"] * 2)
    assert family_of(config).mixer is None
    assert rotates_freely(small_model(config))
    with pytest.raises(
        ModelError, match="tensor_parallel=2 for a granitemoehybrid, which transformers does not divide"
    ):
        gac.allocate(small_model(config), 0.7, tensor_parallel=2, progress=False)


def test_a_single_expert_is_routed_to_in_granite() -> None:
    config = small_config("granitemoehybrid", num_local_experts=1, num_experts_per_tok=1)
    assert config.num_local_experts == 1
    stacks = [module for name, module in small_model(config).named_modules() if name.endswith("moe.experts")]
    counted = sum(values.numel() for stack in stacks for values in stack.parameters())
    assert family_of(config).routed_params(config) == RoutedParams(counted, counted)


def test_buffers_that_no_file_has_are_those_of_the_config(
    small: Small, without_gac: WithoutGac, tmp_path: Path
) -> None:
    """Falcon-H1 multiplies the output of ``in_proj`` by a vector that its model computes."""
    model = deep("falcon_h1")
    loaded = saved_and_loaded(
        small.compress(small.allocate(0.7, model=model, workloads=()), model=model), tmp_path / "saved", without_gac
    )
    vectors: list[Tensor] = [layer.mamba.mup_vector for layer in (*model.model.layers, *loaded.model.layers)]
    assert all(torch.equal(vector, vectors[0]) for vector in vectors)
    assert not torch.equal(vectors[0], torch.ones_like(vectors[0]))


def test_the_width_of_lfm2_follows_from_its_config() -> None:
    stated: dict[str, Any] = {"intermediate_size": 300, "block_multiple_of": 64}
    for changed, width in (
        ({}, 256),
        ({"block_ffn_dim_multiplier": 1.4}, 320),
        ({"block_auto_adjust_ff_dim": False}, 300),
    ):
        config = AutoConfig.for_model("lfm2", hidden_size=64, num_hidden_layers=1, **stated | changed)
        assert (
            weights_of(config)[-1].in_features
            == width
            == small_model(config).model.layers[0].feed_forward.w2.in_features
        )


@pytest.mark.parametrize("model_type", GEMMA_4)
def test_keys_that_are_values_too_are_cached_twice(model_type: str) -> None:
    config = small_config(model_type)
    with torch.no_grad():
        cache = small_model(config)(IDS, use_cache=True).past_key_values
    (sliding, full) = (layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel() for layer in cache.layers)
    cached = [weight for weight in weights_of(config) if weight.cached]
    assert [(weight.name.rpartition(".")[2], weight.as_values) for weight in cached] == [
        ("k_proj", False),
        ("v_proj", False),
        ("k_proj", True),
    ]
    numbers = [weight.cached_numbers for weight in cached]
    assert (sum(numbers[:2]), numbers[2]) == (sliding, full)


def test_sizes_of_every_layer_are_in_the_digest_of_a_config() -> None:
    config, other = small_config("gemma4_text"), small_config("gemma4_text")
    other.per_layer_config = {1: {"head_dim": 64, "num_key_value_heads": 1}}
    assert family_of(config).sizes(config) != family_of(other).sizes(other)


def test_layers_that_take_more_than_hidden_states_are_refused_by_what_they_take() -> None:
    config = small_config("gemma4_text")
    config.hidden_size_per_layer_input = 16
    with pytest.raises(
        ModelError, match=r"layers that also take embeddings of their own \(hidden_size_per_layer_input 16\)"
    ):
        family_of(config)


def test_whole_steps_of_an_engine_are_of_models_whose_layers_are_alike() -> None:
    workload = Workload.parse("decode:1@64")
    assert len(steps_of(small_config("llama"), workload)) == 4
    assert {steps_of(small_config(model_type), workload) for model_type in (*TWO_KINDS, *GEMMA_4)} == {()}
