"""Shorter value vectors in every family: the same model where nothing is lost, files, caches, fused inputs."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gac.compression.checkpoint import load_checkpoint, save_checkpoint
from gac.compression.fusing import fuse_inputs
from gac.compression.layers import ValueLinear
from gac.models.families import family_of, supported
from gac.plan import Plan
from gac.sites import as_planned
from tests.compression.applying import IDS, applied, logits

MakePlan = Callable[[Any, Mapping[str, tuple[str, int]]], Plan]
SHORT, HEADS, GROUPS, HEAD_DIM = 8, 4, 2, 16
FORMS = ("low_rank", "narrow", "head_dim")


def config_of(model_type: str) -> Any:
    config: Any = AutoConfig.for_model(
        model_type,
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return config


def dense_model(config: Any, span: int = HEAD_DIM) -> PreTrainedModel:
    """A random model; its value vectors lie in as many directions as ``span`` says."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        weight = layer.self_attn.v_proj.weight
        rows = torch.randn(GROUPS, HEAD_DIM, span) @ torch.randn(GROUPS, span, weight.shape[1]) / span
        with torch.no_grad():
            weight.copy_(rows.flatten(0, 1))
    return model


def changes(layers: int = 2) -> dict[str, tuple[str, int]]:
    names = [f"model.layers.{layer}.self_attn.{name}" for layer in range(layers) for name in ("v_proj", "o_proj")]
    return dict.fromkeys(names, ("head_dim", SHORT))


@pytest.mark.parametrize("model_type", supported())
def test_nothing_is_lost_where_values_lie_in_few_directions(model_type: str, make_plan: MakePlan) -> None:
    config = config_of(model_type)
    model = dense_model(config, span=SHORT)
    before = logits(model)
    small = applied(model, make_plan(config, changes()), "svd-llm")  # which damps least
    attention: Any = small.get_submodule("model.layers.1.self_attn")
    assert attention.v_proj.weight.shape == (GROUPS * SHORT, 64)
    assert attention.o_proj.weight.shape == (64, HEADS * SHORT)
    assert (logits(small) - before).abs().max() < 1e-3 * before.abs().max()


@pytest.fixture
def small(make_plan: MakePlan) -> PreTrainedModel:
    config = config_of("llama")
    plan = make_plan(config, changes() | {"model.layers.0.self_attn.q_proj": ("low_rank", 16)})
    model = applied(dense_model(config), plan)
    model.gac_plan = plan
    return model


def test_the_loss_is_small_but_there(small: PreTrainedModel) -> None:
    before = logits(dense_model(config_of("llama")))
    assert 1e-4 < (logits(small) - before).abs().max() < before.abs().max()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_both_ways_to_attend_agree(small: PreTrainedModel, implementation: str) -> None:
    expected = logits(small)
    small.set_attn_implementation(implementation)
    assert (logits(small) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_with_a_cache_equals_generation_without(small: Any, cache: str | None) -> None:
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    without = small.generate(IDS, use_cache=False, **given)
    assert torch.equal(small.generate(IDS, cache_implementation=cache, **given), without)


def test_the_cache_keeps_shorter_values(small: Any) -> None:
    with torch.no_grad():
        cache = small(IDS, use_cache=True).past_key_values
    for layer in cache.layers:
        assert layer.keys.shape == (2, GROUPS, 20, HEAD_DIM)
        assert layer.values.shape == (2, GROUPS, 20, SHORT)


def test_a_round_trip_changes_no_bit(small: PreTrainedModel, tmp_path: Path) -> None:
    save_checkpoint(small, tmp_path / "saved")
    loaded = load_checkpoint(tmp_path / "saved")
    assert isinstance(loaded.get_submodule("model.layers.0.self_attn.v_proj"), ValueLinear)
    assert loaded.gac_plan == small.gac_plan
    assert torch.equal(logits(loaded), logits(small))


def test_inputs_can_be_fused(small: PreTrainedModel) -> None:
    other = copy.deepcopy(small)
    fuse_inputs(other, as_planned(family_of(other.config).sites(other.config), FORMS, fused=True))
    assert other.get_submodule("model.layers.0.self_attn.q_proj.fused").weight.shape[0] == 16 + 32 + GROUPS * SHORT
    assert (logits(other) - logits(small)).abs().max() < 1e-5
    assert set(other.state_dict()) == set(small.state_dict())


def test_a_bias_comes_along(make_plan: MakePlan) -> None:
    config = LlamaConfig(**(config_of("llama").to_dict() | {"attention_bias": True}))
    model = dense_model(config, span=SHORT)
    for layer in model.model.layers:
        attention = layer.self_attn
        with torch.no_grad():
            attention.v_proj.bias.copy_(attention.v_proj.weight @ torch.randn(64))
            attention.o_proj.bias.normal_()
    before = logits(model)
    small = applied(model, make_plan(config, changes()), "svd-llm")
    assert (logits(small) - before).abs().max() < 1e-3 * before.abs().max()


def test_it_compiles_as_one_graph(small: LlamaForCausalLM) -> None:
    compiled = torch.compile(small, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert (compiled(IDS).logits - logits(small)).abs().max() < 1e-5
