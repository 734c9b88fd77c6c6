"""Fused inputs: the same outputs, the same names, one GEMM."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from gac.runtime.fusion.shared_gemm import FusedInput
from tests.compression.applying import IDS, logits
from tests.compression.compressed import MakePlan, compressed, share_inputs
from tests.models.small import small_config, small_model

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.1.mlp"
CHANGES = {
    f"{ATTENTION}.q_proj": ("low_rank", 16),
    f"{ATTENTION}.v_proj": ("low_rank", 8),
    "model.layers.0.mlp.gate_proj": ("low_rank", 24),
    **{f"{MLP}.{name}": ("narrow", 96) for name in ("gate_proj", "up_proj", "down_proj")},
}


@pytest.fixture
def plain(tiny_model: LlamaForCausalLM, make_plan: MakePlan) -> LlamaForCausalLM:
    """Some weights low rank, some narrow, the rest dense; every GEMM by itself."""
    return compressed(tiny_model, make_plan, CHANGES)


def fused(model: nn.Module) -> nn.Module:
    return share_inputs(copy.deepcopy(model))


def test_a_layer_has_a_gemm_for_q_k_v_and_one_for_gate_and_up(plain: LlamaForCausalLM) -> None:
    model = fused(plain)
    found = {name: module.weight.shape[0] for name, module in model.named_modules() if isinstance(module, FusedInput)}
    assert found == {
        "model.layers.0.self_attn.q_proj.fused": 16 + 32 + 8,
        "model.layers.0.mlp.gate_proj.fused": 24 + 176,
        "model.layers.1.self_attn.q_proj.fused": 64 + 32 + 32,
        "model.layers.1.mlp.gate_proj.fused": 2 * 96,
    }


@pytest.mark.parametrize(
    ("features", "widths"),
    [
        (10**6, [56, 200, 128, 192]),
        (32, [24, 32, 24, 176, 64, 32, 32, 96, 96]),
        (8, [16, 32, 8, 24, 176, 64, 32, 32, 96, 96]),
    ],
)
def test_long_parts_run_apart_and_the_others_share_what_is_left(
    plain: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, features: int, widths: list[int]
) -> None:
    monkeypatch.setattr("gac.runtime.contract._ENOUGH_OUTPUTS", features * IDS.numel())
    found, multiplied = [], FusedInput._multiplied

    def counted(self: FusedInput, x: torch.Tensor, part: slice) -> torch.Tensor:
        found.append(part.stop - part.start)
        return multiplied(self, x, part)

    monkeypatch.setattr(FusedInput, "_multiplied", counted)
    logits(fused(plain))
    assert found == widths
    assert (logits(fused(plain)) - logits(plain)).abs().max() < 1e-5


def test_a_fused_model_loads_what_an_unfused_one_saved(plain: LlamaForCausalLM) -> None:
    model = fused(plain)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert not model.load_state_dict(plain.state_dict()).missing_keys
    assert (logits(model) - logits(plain)).abs().max() < 1e-5


def test_a_missing_or_misshapen_part_is_named(plain: LlamaForCausalLM) -> None:
    model, given = fused(plain), dict(plain.state_dict())
    del given[f"{ATTENTION}.k_proj.weight"]
    given[f"{ATTENTION}.v_proj.first.weight"] = torch.zeros(9, 64)
    with pytest.raises(RuntimeError, match=r"(?s)v_proj.first.weight has shape \(9, 64\), not \(8, 64\)") as caught:
        model.load_state_dict(given)
    assert f"{ATTENTION}.k_proj.weight" in str(caught.value)


def test_biases_stay_with_their_weights() -> None:
    model = small_model(small_config("qwen2"))
    assert (logits(fused(model)) - logits(model)).abs().max() < 1e-5
    assert fused(model).state_dict().keys() == model.state_dict().keys()


def test_a_tensor_that_was_changed_in_place_is_read_again_in_any_order(plain: LlamaForCausalLM) -> None:
    """A CUDA graph, say, has one input tensor for every step."""
    model, x = fused(plain), torch.randn(3, 64)
    with torch.no_grad():
        for names in (("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj", "q_proj", "k_proj")):
            for name in names:
                ours, theirs = (one.get_submodule(f"{ATTENTION}.{name}")(x) for one in (model, plain))
                assert (ours - theirs).abs().max() < 1e-5
            x.add_(1.0)


def test_gradients_reach_every_part(plain: LlamaForCausalLM) -> None:
    model = fused(plain)
    model(IDS, labels=IDS).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    plain(IDS, labels=IDS).loss.backward()
    whole = gradients[f"{ATTENTION}.q_proj.fused.weight"]
    assert whole is not None
    parts = (plain.get_submodule(f"{ATTENTION}.{name}") for name in ("v_proj.first", "q_proj.first", "k_proj"))
    assert (whole - torch.cat([part.weight.grad for part in parts])).abs().max() < 1e-6
