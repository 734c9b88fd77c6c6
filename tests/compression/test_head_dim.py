"""Shorter value vectors in every family: the same model where nothing is lost, files, caches, fused inputs."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

import gac
from gac.compression.modules import share_gemms
from gac.forms.planned_sites import as_planned
from gac.models.families import family_of, supported
from gac.plan import Plan
from gac.runtime.modules import ValueLinear
from tests.compression.applying import IDS, applied, logits
from tests.models.small import small_config, small_model, weights_of

MakePlan = Callable[[Any, Mapping[str, tuple[str, int]]], Plan]
SHORT, HEADS, GROUPS, HEAD_DIM = 8, 4, 2, 16
FORMS = ("low_rank", "narrow", "head_dim")
SEPARATE = [name for name in supported() if any(weight.values for weight in weights_of(small_config(name)))]


def dense_model(config: Any, span: int = HEAD_DIM) -> PreTrainedModel:
    """A random model; its value vectors lie in as many directions as ``span`` says."""
    model = small_model(config)
    for weight in weights_of(config):
        if weight.values == "out":
            v_proj: Any = model.get_submodule(weight.name)
            groups, features = weight.heads, weight.in_features
            rows = torch.randn(groups, HEAD_DIM, span) @ torch.randn(groups, span, features) / span
            with torch.no_grad():
                v_proj.weight.copy_(rows.flatten(0, 1))
                if v_proj.bias is not None:
                    v_proj.bias.copy_(v_proj.weight @ torch.randn(features))
    return model


def changes(config: Any) -> dict[str, tuple[str, int]]:
    return {weight.name: ("head_dim", SHORT) for weight in weights_of(config) if weight.values}


def test_most_architectures_have_values_of_their_own() -> None:
    assert set(supported()) - set(SEPARATE) == {"gpt2", "gpt_neox", "phi3"}


@pytest.mark.parametrize("model_type", SEPARATE)
def test_nothing_is_lost_where_values_lie_in_few_directions(model_type: str, make_plan: MakePlan) -> None:
    config = small_config(model_type, head_dim=HEAD_DIM)
    model = dense_model(config, span=SHORT)
    before = logits(model)
    small = applied(model, make_plan(config, changes(config)), "svd-llm")  # which damps least
    for weight in weights_of(config):
        module: Any = small.get_submodule(weight.name)
        shorter = (weight.heads * SHORT, weight.in_features), (weight.out_features, weight.heads * SHORT)
        if weight.values:
            assert module.weight.shape == shorter[weight.values == "in"]
    assert (logits(small) - before).abs().max() < 1e-3 * before.abs().max()


@pytest.mark.parametrize("model_type", SEPARATE)
def test_every_architecture_generates_from_shorter_values(model_type: str, make_plan: MakePlan) -> None:
    config = small_config(model_type, head_dim=HEAD_DIM)
    small: Any = applied(dense_model(config), make_plan(config, changes(config)))
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(small.generate(IDS, **given), small.generate(IDS, use_cache=False, **given))


@pytest.fixture
def small(make_plan: MakePlan) -> PreTrainedModel:
    config = small_config("llama", head_dim=HEAD_DIM)
    plan = make_plan(config, changes(config) | {"model.layers.0.self_attn.q_proj": ("low_rank", 16)})
    model = applied(dense_model(config), plan)
    model.gac_plan = plan
    return model


def test_the_loss_is_small_but_there(small: PreTrainedModel) -> None:
    before = logits(dense_model(small_config("llama", head_dim=HEAD_DIM)))
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
    gac.save(small, tmp_path / "saved")
    loaded = gac.load(tmp_path / "saved")
    assert isinstance(loaded.get_submodule("model.layers.0.self_attn.v_proj"), ValueLinear)
    assert loaded.gac_plan == small.gac_plan
    assert torch.equal(logits(loaded), logits(small))


def test_inputs_can_be_fused(small: PreTrainedModel) -> None:
    other = copy.deepcopy(small)
    share_gemms(other, as_planned(family_of(other.config).sites(other.config), FORMS, fused=True))
    assert other.get_submodule("model.layers.0.self_attn.q_proj.fused").weight.shape[0] == 16 + 32 + GROUPS * SHORT
    assert (logits(other) - logits(small)).abs().max() < 1e-5
    assert set(other.state_dict()) == set(small.state_dict())


def test_a_bias_comes_along(make_plan: MakePlan) -> None:
    config = LlamaConfig(**(small_config("llama", head_dim=HEAD_DIM).to_dict() | {"attention_bias": True}))
    model = dense_model(config, span=SHORT)
    before = logits(model)
    small = applied(model, make_plan(config, changes(config)), "svd-llm")
    assert (logits(small) - before).abs().max() < 1e-3 * before.abs().max()
