"""A low-rank pair for each group of heads: the contract of a form, from its counts to a saved model that generates."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import gac
from gac.compression.modules import share_gemms
from gac.errors import PlanError
from gac.forms import form_named
from gac.forms.grouped.spec import Grouped
from gac.forms.planned_sites import as_planned
from gac.models.families import family_of
from gac.models.weights import Weight
from gac.plan import Plan
from gac.runtime.modules import BlockLinear, GroupedLinear
from tests.compression.applying import IDS, applied, logits

MakePlan = Callable[[Any, Mapping[str, tuple[str, int]]], Plan]
K = Weight("k", 128, 96, heads=8, cached=True)


@pytest.fixture
def config() -> LlamaConfig:
    """8 query heads and 4 key-value heads of 16."""
    return LlamaConfig(
        vocab_size=258,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


@pytest.fixture
def dense(config: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def changes(form: str, dim: int) -> dict[str, tuple[str, int]]:
    names = [f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("k_proj", "v_proj")]
    return dict.fromkeys(names, (form, dim))


@pytest.fixture
def small(config: LlamaConfig, dense: LlamaForCausalLM, make_plan: MakePlan) -> LlamaForCausalLM:
    """Two groups of two heads, rank 12 of 32."""
    plan = make_plan(config, changes("grouped:2", 12))
    model: Any = applied(dense, plan, "palu:2")
    model.gac_plan = plan
    return model


# --- what it counts -------------------------------------------------------------------------------------------------


def test_it_counts_both_factors_and_caches_the_latents() -> None:
    form = Grouped(2)
    assert (form.groups(K), form.full(K), form.largest_useful(K)) == (4, 32, 31)
    assert form.params(K, 10) == 4 * (10 * 96 + 32 * 10)
    assert form.cached(K, 10) == 40
    assert form.cached(K, form.full(K)) == form_named("dense").cached(K, 1) == 128


def test_the_size_of_a_group_is_part_of_the_name() -> None:
    assert form_named("grouped").name == form_named("grouped:4").name == "grouped"
    assert form_named("grouped:2").name == "grouped:2"
    assert form_named("grouped:2").kind == "grouped"


@pytest.mark.parametrize("name", ["grouped:", "grouped:0", "grouped:-1", "grouped:x", "low_rank:2"])
def test_what_is_no_form(name: str) -> None:
    with pytest.raises(PlanError, match=r"form .*grouped:|form 'low_rank:2' is unknown"):
        form_named(name)


def test_fewer_heads_than_a_group_are_one_group() -> None:
    assert Grouped(4).groups(Weight("k", 192, 576, heads=3, cached=True)) == 1


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        Grouped(4).groups(Weight("k", 96, 64, heads=6, cached=True))
    assert str(caught.value) == (
        "groups of 4 of the 6 heads of k; expected groups of 1, 2, 3, 6 heads. "
        "Give the number of heads after a colon: grouped:6, or the method palu:6."
    )


def test_only_keys_and_values_take_it(config: LlamaConfig) -> None:
    sites = family_of(config).sites(config)
    taking = [weight.name for site in sites for weight in site.weights if Grouped(2).takes(weight)]
    assert taking == list(changes("grouped:2", 1))


# --- what runs ------------------------------------------------------------------------------------------------------


def test_the_second_factors_are_a_block_diagonal() -> None:
    torch.manual_seed(0)
    blocks = BlockLinear(4, 3, 5, True, dtype=torch.float64)
    for parameter in blocks.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    torch.testing.assert_close(blocks(x), x @ torch.block_diag(*blocks.weight).T + blocks.bias)


def test_a_bias_comes_along(config: LlamaConfig, make_plan: MakePlan) -> None:
    config.attention_bias = True
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias)
        torch.nn.init.normal_(layer.self_attn.v_proj.bias)
    before = logits(model)
    small = applied(model, make_plan(config, changes("grouped:2", 32)), "palu:2")
    assert (logits(small) - before).abs().max() < 1e-4 * before.abs().max()


def test_a_smaller_rank_loses_something(small: LlamaForCausalLM, config: LlamaConfig) -> None:
    torch.manual_seed(0)
    before = logits(LlamaForCausalLM(config).eval())
    assert 1e-4 < (logits(small) - before).abs().max() < before.abs().max()


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_with_a_cache_equals_generation_without(small: Any, cache: str | None) -> None:
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    without = small.generate(IDS, use_cache=False, **given)
    assert torch.equal(small.generate(IDS, cache_implementation=cache, **given), without)


def test_a_round_trip_changes_no_bit(small: PreTrainedModel, tmp_path: Path) -> None:
    gac.save(small, tmp_path / "saved")
    loaded = gac.load(tmp_path / "saved")
    assert isinstance(loaded.get_submodule("model.layers.0.self_attn.v_proj"), GroupedLinear)
    assert loaded.gac_plan == small.gac_plan
    assert torch.equal(logits(loaded), logits(small))


def test_inputs_can_be_fused(small: PreTrainedModel) -> None:
    other = copy.deepcopy(small)
    share_gemms(other, as_planned(family_of(other.config).sites(other.config), ["grouped:2"], fused=True))
    assert other.get_submodule("model.layers.0.self_attn.q_proj.fused").weight.shape[0] == 128 + 24 + 24
    assert (logits(other) - logits(small)).abs().max() < 1e-5
    assert set(other.state_dict()) == set(small.state_dict())
