"""Sites from a config alone, and the properties of a compressed model of every layout."""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig
from transformers.pytorch_utils import Conv1D

import gac
from gac.core.errors import PlanError
from gac.core.operations import linear
from gac.forms import FORMS
from gac.forms.curvature.registry import METHODS
from gac.forms.planned_sites import check_forms_fit
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import measure_curves
from gac.models.attentions import WITHOUT_HEAD_KEYS
from gac.models.families import family_of, text_config
from gac.models.linears import as_linear, check_sizes
from gac.models.modules import last_norm_of
from gac.models.plain import check_plain
from gac.models.shapes import SHAPES
from gac.models.sites import Weight
from tests.compression.applying import IDS, applied, logits, smaller_dims, with_dims
from tests.compression.compressed import MakePlan, share_inputs
from tests.models.small import (
    LAYOUTS,
    MIXTURES,
    NEURONS,
    every_family,
    every_layout,
    linear_weights,
    small_config,
    small_model,
    weights_of,
)
from tests.refused import assert_refused


def full_dims(weights: Sequence[Weight]) -> dict[str, tuple[str, int]]:
    """Full rank everywhere in the first layer, full width in the second."""
    full = {w.name: ("low_rank", min(w.out_features, w.in_features)) for w in weights if ".0." in w.name}
    neurons = {w.name: w.in_features for w in weights if w.neurons == "in"}
    full_width = neurons.popitem()[1] if neurons else NEURONS
    return full | {w.name: ("narrow", full_width) for w in weights if ".1." in w.name and w.neurons}


def compressed_model(model_type: str, make_plan: MakePlan) -> Any:
    """A model with smaller layers."""
    return with_dims(small_model(small_config(model_type)), smaller_dims, make_plan)


@pytest.fixture(scope="module", params=LAYOUTS)
def compressed(request: pytest.FixtureRequest, make_plan: MakePlan) -> Any:
    return compressed_model(request.param, make_plan)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("num_hidden_layers", 2**53, "a config with num_hidden_layers 9007199254740992; expected 1 to 4,096."),
        ("hidden_size", -1, "a config with hidden_size -1"),
        ("num_key_value_heads", 2**31, "a config whose weight self_attn.k_proj is 34359738368 x 64"),
    ],
)
def test_an_impossible_size_is_refused(name: str, size: int, message: str, tiny_config: LlamaConfig) -> None:
    setattr(tiny_config, name, size)
    assert_refused(lambda: family_of(tiny_config).sites(tiny_config), message)


@every_layout
def test_the_sites_are_all_matrices_of_the_layers(model_type: str) -> None:
    config = small_config(model_type)
    sizes = {weight.name: (weight.out_features, weight.in_features) for weight in weights_of(config)}
    assert sizes == linear_weights(small_model(config))


class Reading:
    """A config that remembers which of its fields were read."""

    def __init__(self, config: Any) -> None:
        self.config, self.read = config, set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name)


@every_layout
def test_the_sites_follow_from_the_sizes(model_type: str) -> None:
    sites, sizes = Reading(small_config(model_type)), Reading(small_config(model_type))
    family = family_of(sites.config)
    family.sites(sites)
    assert family.sizes(sizes)[0] == model_type
    assert sites.read - {"layer_types", "use_qk_norm"} <= sizes.read  # which tell what can be skipped and dropped


@every_layout
def test_full_dims_lose_nothing(model_type: str, make_plan: MakePlan) -> None:
    config = small_config(model_type)
    dense = logits(small_model(config))
    full = applied(small_model(config), make_plan(config, full_dims(weights_of(config))))
    assert (logits(full) - dense).abs().max() < 1e-4 * dense.abs().max()


@every_family
def test_a_fresh_model_of_every_family_passes_the_checks_before_measuring(model_type: str) -> None:
    config = small_config(model_type)
    check_plain(small_model(config), [weight.name for weight in weights_of(config)])
    check_sizes(small_model(config), weights_of(config))


@pytest.mark.slow
@every_family
def test_a_compressed_model_of_every_family_is_saved_and_loaded(
    model_type: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    test_full_dims_lose_nothing(model_type, make_plan)
    model = compressed_model(model_type, make_plan)
    gac.save(model, tmp_path / "saved")
    loaded: Any = gac.load(tmp_path / "saved")
    assert loaded.gac_plan == model.gac_plan
    assert torch.equal(logits(loaded), logits(model)) or model_type in MIXTURES
    torch.testing.assert_close(logits(loaded), logits(model))  # grouped GEMMs round by where weights lie in memory
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_cache=False, **options))


def test_weights_that_read_the_same_input_can_be_fused(compressed: Any) -> None:
    fused = share_inputs(copy.deepcopy(compressed))
    assert set(fused.state_dict()) == set(compressed.state_dict())
    assert (logits(fused) - logits(compressed)).abs().max() < 1e-5


@every_layout
def test_the_cache_keeps_what_is_counted(model_type: str) -> None:
    config = small_config(model_type)
    with torch.no_grad():
        cache = small_model(config)(IDS, use_cache=True).past_key_values
    tokens = IDS.numel()
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in layers)
    assert kept == tokens * sum(weight.cached_numbers for weight in weights_of(config))


def test_neurons_may_be_two_blocks_or_not_stated() -> None:
    """Gate above up in one weight: a width takes rows of both. GPT-2 has four times the hidden size by default."""
    weight = Weight("gate_up", 2 * NEURONS, 64, neurons="out", blocks=2)
    narrow = FORMS.get("narrow")
    assert (narrow.full(weight), narrow.max_useful_dim(weight)) == (NEURONS, NEURONS - 1)
    assert narrow.params(weight, 40) == 2 * 40 * 64
    assert narrow.latency.operation(weight, 40, rows=5) == linear(5, 64, 80)
    config = small_config("gpt2")
    config.n_inner = None
    assert [weight.out_features for weight in weights_of(config)[2:4]] == [256, 64]


def test_a_form_that_fits_no_weight_is_refused(tiny_config: LlamaConfig) -> None:
    tiny_config.num_key_value_heads = 1
    none = "form head_dim, which fits no weight of a phi3 model; expected one of dense"
    one_head = "form heads for a llama model with one KV head"
    for config, form, message in ((small_config("phi3"), "head_dim", none), (tiny_config, "heads", one_head)):
        sites, forms = family_of(config).sites(config), ("low_rank", form)
        refused = partial(check_forms_fit, sites, forms, config.model_type)
        assert_refused(refused, message, error=PlanError)


@pytest.mark.parametrize(
    ("kind", "model_types"),
    [
        (", with layers of state spaces, convolutions or linear attention", "mamba recurrent_gemma rwkv"),
        (", an encoder-decoder", "t5 whisper"),
        (", an encoder", "bert"),
        (", a multimodal model around a mllama_text_model; expected a language model, or ", "mllama"),
        (", a multimodal model that runs on no text without an image", "blip-2 instructblip"),
        (", with multi-head latent attention", "minicpm3"),
        (", a multimodal model whose class in transformers 5.24 runs on no text without an image", "llama4"),
        (", a mixture of experts (8 experts a layer); expected one MLP a layer, ", "jetmoe"),
        (", a mixture of experts (16 experts a layer)", "jamba"),
        (", a mixture of experts (256 experts a layer)", "deepseek_v32 mimo_v2_flash"),
        ("; expected a supported architecture (afmoe, ", "gpt_neo gemma3n_text vit"),
    ],
)
def test_another_architecture_is_refused_with_its_kind(kind: str, model_types: str) -> None:
    for model_type in model_types.split():
        config = AutoConfig.for_model(model_type)
        assert_refused(partial(family_of, config), f"model type '{model_type}'{kind}")


def test_experts_are_found_in_any_config_and_the_text_part_in_a_multimodal_one() -> None:
    dbrx = SimpleNamespace(model_type="dbrx", ffn_config=SimpleNamespace(moe_num_experts=4))
    by_layer = SimpleNamespace(model_type="other_moe", num_experts=[1, 16])
    assert "llama" in family_of(SimpleNamespace(model_type="llama", num_local_experts=1)).model_types
    for config, experts in ((dbrx, 4), (by_layer, 16)):
        assert_refused(partial(family_of, config), "model type", f"({experts} experts a layer)")
    config: Any = AutoConfig.for_model("gemma3", text_config=small_config("gemma3_text").to_dict())
    assert text_config(config) is config.text_config is text_config(config.text_config)
    assert len(family_of(text_config(config)).sites(text_config(config))) == 10
    assert len(family_of(config).sites(config)) == 10
    config.text_config.model_type = "vit"
    assert_refused(
        lambda: family_of(config), "model type 'gemma3', a multimodal model around a vit; expected a language"
    )


@pytest.mark.parametrize("model_type", WITHOUT_HEAD_KEYS)
def test_keys_that_an_architecture_does_not_read_change_no_size(model_type: str) -> None:
    config, plain = small_config(model_type), small_config(model_type)
    vars(config).update(num_key_value_heads=2, head_dim=2)  # Falcon's property has no setter
    assert family_of(config).sites(config) == family_of(plain).sites(plain)
    model = small_model(config)
    check_sizes(model, weights_of(config))
    model.set_submodule(weights_of(config)[-1].name, nn.Linear(7, 5))
    assert_refused(
        lambda: check_sizes(model, weights_of(config)), weights_of(config)[-1].name, "has 5 outputs and 7 in"
    )


def test_a_model_without_a_last_norm() -> None:
    assert last_norm_of(small_model(small_config("opt"))) == "model.decoder.final_layer_norm"
    assert last_norm_of(small_model(small_config("opt", do_layer_norm_before=False))) is None


KNOWN = {
    "smollm2": 106_168_320,
    "llama-3-8b": 6_979_321_856,
    "llama-2-7b": 6_476_005_376,
    "mistral-7b": 6_979_321_856,
    "qwen3-8b": 6_945_767_424,
    "gemma-3-4b": 3_208_642_560,
    "llama-3-70b": 68_451_041_280,
}
"""Linear weights as the model cards have them, without embeddings, lm_head and norms."""


def test_the_linear_weights_of_well_known_models_add_up() -> None:
    assert {name: sum(site.params for site in family_of(SHAPES[name]).sites(SHAPES[name])) for name in SHAPES} == KNOWN


def test_a_transposed_weight_computes_the_same() -> None:
    torch.manual_seed(0)
    stored = Conv1D(24, 40)
    nn.init.normal_(stored.bias)
    linear = as_linear(stored)
    assert isinstance(linear, nn.Linear)
    assert linear.weight.shape == (24, 40)
    assert linear.weight.data_ptr() == stored.weight.data_ptr()
    assert as_linear(linear) is linear
    x = torch.randn(2, 3, 40)
    torch.testing.assert_close(linear(x), stored(x))


def test_loss_curves_are_those_of_the_same_linear_layers() -> None:
    stored = small_model(small_config("gpt2"))
    linear = copy.deepcopy(stored)
    for weight in weights_of(stored.config):
        twin = nn.Linear(weight.in_features, weight.out_features)
        with torch.no_grad():
            twin.weight.copy_(stored.get_submodule(weight.name).weight.T)
            twin.bias.copy_(stored.get_submodule(weight.name).bias)
        linear.set_submodule(weight.name, twin)
    sites = family_of(stored.config).sites(stored.config)
    ours, theirs = (
        measure_curves(CalibrationRun(model, IDS, METHODS.get("kfac"), progress=False), sites).curves
        for model in (stored, linear)
    )
    for key, curve in ours.by_key.items():
        np.testing.assert_allclose(curve.loss, theirs.by_key[key].loss, rtol=1e-3, atol=1e-7)


def test_norms_that_the_config_leaves_out_are_on_no_path() -> None:
    for flag in (True, False):
        config = small_config("hyperclovax", use_post_norm=flag)
        writer = weights_of(config)[3]
        assert writer.normed is flag
        path = family_of(config).residual_path(config, writer.name)
        assert path.norm == ("model.layers.0.post_norm1" if flag else None)
        assert path.norm is None or any(name == path.norm for name, _ in small_model(config).named_modules())
