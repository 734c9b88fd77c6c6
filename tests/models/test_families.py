"""Sites from a config alone, how they count, and that they are there in every supported architecture."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gac.errors import ModelError
from gac.forms import FORMS, Weight
from gac.models.families import family_of, supported, text_config
from gac.plan import Plan
from tests.compression.applying import applied, logits

SMALL = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}


def small_model(model_type: str) -> PreTrainedModel:
    """Two random layers whose heads, 4 of 32, are wider than the hidden size of 64."""
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(model_type, **SMALL)
    return AutoModelForCausalLM.from_config(config).eval()


def test_the_sites_are_the_weights_of_the_model(tiny_config: LlamaConfig, tiny_model: LlamaForCausalLM) -> None:
    weights = [weight for site in family_of(tiny_config).sites(tiny_config) for weight in site.weights]
    ours = {weight.name: (weight.out_features, weight.in_features) for weight in weights}
    theirs = {
        name.removesuffix(".weight"): tuple(parameter.shape)
        for name, parameter in tiny_model.named_parameters()
        if "proj" in name
    }
    assert ours == theirs


@pytest.mark.parametrize("model_type", supported())
def test_the_sites_are_all_matrices_of_the_layers(model_type: str) -> None:
    model = small_model(model_type)
    weights = [weight for site in family_of(model.config).sites(model.config) for weight in site.weights]
    assert {weight.name: (weight.out_features, weight.in_features) for weight in weights} == {
        name.removesuffix(".weight"): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if ".layers." in name and parameter.ndim == 2
    }
    query, _, _, output = weights[:4]
    assert (query.out_features, query.in_features, output.out_features, output.in_features) == (128, 64, 64, 128)


@pytest.mark.parametrize("model_type", supported())
def test_full_dims_lose_nothing_in_any_architecture(model_type: str, make_plan: Callable[..., Plan]) -> None:
    model = small_model(model_type)
    dense = logits(model)
    weights = [weight for site in family_of(model.config).sites(model.config) for weight in site.weights]
    full = {w.name: ("low_rank", min(w.out_features, w.in_features)) for w in weights if "layers.0" in w.name}
    full |= {w.name: ("narrow", 176) for w in weights if "layers.1" in w.name and w.neurons}
    assert (logits(applied(model, make_plan(model.config, full))) - dense).abs().max() < 1e-4 * dense.abs().max()


def test_an_explicit_head_dim_counts() -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=1, head_dim=32)
    query = family_of(config).sites(config)[0].weights[0]
    assert (query.out_features, query.in_features) == (128, 64)


def test_the_mlp_is_one_site_with_neurons(tiny_config: LlamaConfig) -> None:
    site = family_of(tiny_config).sites(tiny_config)[4]
    assert (site.kind, site.weights[2].in_features, len(site.weights)) == ("mlp", 176, 3)


def test_an_unknown_architecture_lists_the_supported(tiny_config: LlamaConfig) -> None:
    tiny_config.model_type = "mamba"
    with pytest.raises(ModelError) as caught:
        family_of(tiny_config)
    assert str(caught.value) == (
        "model type 'mamba'; expected a supported architecture (gemma, gemma2, gemma3_text, granite, llama, mistral, "
        "olmo2, qwen2, qwen3, smollm3). Use a model of one of these architectures."
    )


def test_a_multimodal_config_has_a_text_part_and_no_family() -> None:
    config: Any = AutoConfig.for_model("gemma3", text_config=SMALL)
    assert text_config(config) is config.text_config
    assert len(family_of(text_config(config)).sites(text_config(config))) == 10
    with pytest.raises(ModelError, match=r"^model type 'gemma3'; expected a supported architecture"):
        family_of(config)


def test_a_text_config_is_its_own_text_part(tiny_config: LlamaConfig) -> None:
    assert text_config(tiny_config) is tiny_config
    bare = SimpleNamespace(model_type="llama")
    assert text_config(bare) is bare


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("side", ["out", "in"])
def test_contract_of_every_form(name: str, side: Literal["out", "in"]) -> None:
    form, weight = FORMS[name], Weight("w", 96, 64, neurons=side, values=side, heads=8, cached=True)
    full = form.full(weight)
    assert form.takes(weight)
    assert form.params(weight, full) >= weight.params
    cost = form.cached if form.counts == "cached" else form.params
    assert cost(weight, form.largest_useful(weight) or full) <= cost(weight, full)
    operation = form.operation(weight, full, rows=5)
    assert operation.axes["m"] == 5
    axis = form.axis(weight)
    assert axis is None or operation.axes[axis] == form.size(weight, full)
