"""Models and text at the edge of what numbers can hold: what comes out is right, or it is refused in words."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM, OPTConfig, OPTForCausalLM

import gac
from gac.core.errors import ModelError, TextError
from gac.forms import FORMS
from gac.forms.curvature.registry import METHODS
from gac.forms.decomposition import decompose
from gac.forms.narrow.elimination import compensated, eliminate, last_to_go
from gac.measurement.curves import ModelCurves, fit_layers, measure_curves
from gac.models.sites import Weight
from gac.testing.methods import KINDS, loss_of, moments_of, statistics
from tests.measurement.runs import run_of, sites_of
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small


@pytest.mark.parametrize("kind", KINDS)
def test_neurons_go_in_an_order_that_costs_what_it_says(kind: str) -> None:
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    metric = METHODS.get("kfac").metric(statistics(kind))
    result = eliminate(weight, metric)
    assert sorted(result.order.tolist()) == list(range(16))
    for width in (1, 8, 15):
        kept = last_to_go(result.order, width)
        smaller = torch.zeros(24, 16, dtype=torch.float64)
        smaller[:, kept] = compensated(weight, kept, metric)
        lost = loss_of(weight, smaller, metric)
        assert lost == pytest.approx(result.curve.loss[width], rel=1e-5, abs=1e-9 * result.curve.loss[0])


@settings(max_examples=20)
@given(st.integers(-8, 8), st.integers(-8, 8))
def test_the_scale_of_statistics_scales_the_curve(inputs: int, gradients: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x, g = torch.randn(64, 16, generator=draw).double(), torch.randn(64, 24, generator=draw).double()
    weight = torch.randn(24, 16, generator=draw)
    plain, scaled = (
        decompose(weight, METHODS.get("kfac").metric(moments_of(x * a, g * b))).curve.loss
        for a, b in ((1.0, 1.0), (10.0**inputs, 10.0**gradients))
    )
    assert np.allclose(scaled, plain * 10.0 ** (2 * inputs + 2 * gradients), rtol=1e-4, atol=0)


# --- whole models -----------------------------------------------------------------------------------------------------


def windows(count: int = 4, length: int = 32, vocabulary: int = 258) -> Tensor:
    return torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(1))


def curves(model: Any, ids: Tensor) -> ModelCurves:
    return measure_curves(run_of(model, windows=ids), sites_of(model))


def rescale(model: LlamaForCausalLM, exponent: int) -> None:
    """Larger neurons that are read as much smaller: the model computes what it did."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(10.0**exponent)
            layer.mlp.down_proj.weight.div_(10.0**exponent)


def check_sound(result: ModelCurves) -> None:
    for curve in result.curves.by_key.values():
        assert np.isfinite(curve.loss).all()
        assert (curve.loss >= 0).all()
        assert curve.loss[-1] == 0


@pytest.mark.parametrize("exponent", [-8, 8])
def test_a_model_that_only_looks_scaled_has_the_same_curves(exponent: int, tiny_model: LlamaForCausalLM) -> None:
    ids = windows(16)  # each half has more tokens than there are features: else directions without any are arbitrary
    plain = curves(tiny_model, ids)
    rescale(tiny_model, exponent)
    scaled = curves(tiny_model, ids)
    assert scaled.dense_loss == pytest.approx(plain.dense_loss, rel=1e-6)
    for key, curve in plain.curves.by_key.items():
        if key[0] == "low_rank":
            other = scaled.curves.by_key[key]
            assert np.allclose(other.loss, curve.loss, rtol=1e-3, atol=1e-6 * curve.loss[0])


@pytest.mark.parametrize("exponent", [-8, 8])
def test_weights_of_any_scale_give_sound_curves(exponent: int, tiny_model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        for name, weight in tiny_model.named_parameters():
            if "proj" in name:
                weight.mul_(10.0**exponent)
    check_sound(curves(tiny_model, windows()))


@pytest.mark.parametrize("exponent", [-30, 30])
def test_scales_beyond_float32_are_refused(exponent: int, tiny_model: LlamaForCausalLM) -> None:
    rescale(tiny_model, exponent)
    with pytest.raises(ModelError, match="of layer 1 is not finite; expected finite activations and gradients"):
        curves(tiny_model, windows())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_overflow_is_refused(dtype: torch.dtype, tiny_model: LlamaForCausalLM) -> None:
    model = tiny_model.to(dtype)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.fill_(torch.finfo(dtype).max / 2)
    with pytest.raises(ModelError, match=r"the loss of calibration window 0 is nan; expected a finite loss"):
        curves(model, windows())


def test_dead_neurons_go_first(tiny_model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        for layer in tiny_model.model.layers:
            layer.mlp.up_proj.weight[100:].zero_()
    for layer, fit in fit_layers(run_of(tiny_model, windows=windows()), sites_of(tiny_model)).items():
        down = Weight(f"model.layers.{layer}.mlp.down_proj", 64, 176)
        assert last_to_go(fit.artifacts.of(FORMS.get("narrow"), "order", down), 100).tolist() == list(range(100))
        loss = fit.losses[f"narrow/{down.name}"]
        assert loss[100] < 0.02 * loss[0]  # damping keeps what was never seen from being free


def test_two_tokens_are_enough_and_a_model_of_zeros_costs_nothing(tiny_model: LlamaForCausalLM) -> None:
    check_sound(curves(tiny_model, windows(1, 2)))
    with torch.no_grad():
        for weight in tiny_model.parameters():
            weight.zero_()
    result = curves(tiny_model, windows())
    check_sound(result)
    assert result.dense_loss == pytest.approx(math.log(258))
    assert {float(curve.loss[0]) for key, curve in result.curves.by_key.items() if key[0] == "low_rank"} == {0.0}


@pytest.mark.parametrize(
    "changed",
    [
        {"num_hidden_layers": 1},
        {"hidden_size": 61, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 62},
        {"hidden_size": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2},
        {"vocab_size": 1, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    ],
    ids=["one layer", "prime hidden size", "hidden size 1", "vocabulary of 1"],
)
def test_small_and_odd_dims(changed: dict[str, int]) -> None:
    model = small_model(small_config("llama", **changed))
    check_sound(curves(model, windows(vocabulary=model.config.vocab_size)))


def test_heads_of_one_dim_and_primes_everywhere(small: Small) -> None:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=258, hidden_size=61, word_embed_proj_dim=61, ffn_dim=173, num_hidden_layers=1,
        num_attention_heads=61, max_position_embeddings=128,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval()
    plan = small.allocate(0.6, model, align=False)
    assert plan.budget.used <= plan.budget.limit
    with torch.no_grad():
        assert torch.isfinite(small.compress(plan, model)(windows(1, 8)).logits).all()


def test_configs_and_tokenizers_are_of_the_model(tiny_model: Any, tmp_path: Path, small: Small) -> None:
    tiny_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for head_dim, why in ((61, "RoPE requires an even rotary dimension"), (0, "head_dim is 0, and not an integer")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": head_dim}))
        with pytest.raises(ModelError, match=why):
            gac.allocate(tmp_path, 0.8, progress=False)
    model = small_model(small_config("llama", vocab_size=50, bos_token_id=0, eos_token_id=0, pad_token_id=0))
    with pytest.raises(TextError, match="the tokenizer gives token id"):
        small.allocate(0.8, model)
    with pytest.raises(TextError, match="calibration windows of 1 token; expected at least 2"):
        small.allocate(0.8, calibration=f"{small.text}:4x1")
