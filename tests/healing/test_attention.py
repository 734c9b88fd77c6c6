"""Attention in training equals PyTorch's, makes no masks, and is deterministic."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import import_utils

from gac.healing import training_mode
from gac.healing.training_mode import fused_norms, maskless_attention
from tests.models.small import small_config, small_model

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def states(device: str, tokens: int, value: int = 64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((4, 9, tokens, 64), (4, 3, tokens, 64), (4, 3, tokens, value))
    return [torch.randn(shape, generator=draw).bfloat16().to(device).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 5, 12, 99])
@pytest.mark.parametrize("padding", [False, True])
def test_a_mask_is_made_only_if_something_is_hidden(window: int | None, padding: bool) -> None:
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :3] = not padding
    sizes = {"batch_size": 2, "q_length": 12, "kv_length": 12, "local_size": window}
    made = training_mode._mask(**sizes, attention_mask=mask if padding else None)
    assert (made is None) == (not padding and window != 5)
    assert training_mode._mask(**sizes | {"q_length": 1, "q_offset": 11}, allow_is_causal_skip=False) is not None


def test_models_on_a_cpu_keep_their_attention() -> None:
    model = small_model(small_config("llama"))
    with maskless_attention(model, model):
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("model_type", "hidden"), [("llama", 0), ("gemma3_text", 1)])
def test_no_mask_is_made_while_a_graph_is_captured(
    model_type: str, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = []

    def attend(module: Any, *inputs: Any, **options: Any) -> Any:
        masks.append(inputs[3])
        return sdpa_attention_forward(module, *inputs, **options)

    model = small_model(small_config(model_type, sliding_window=9, layer_types=["sliding_attention", "full_attention"]))
    ids = torch.arange(20)[None]
    expected, packed = model(ids, use_cache=False).logits, masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(training_mode, "_has_flash", lambda device: True)
    monkeypatch.setattr(training_mode, "_attend", attend)
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    with maskless_attention(model):
        output = model(ids, use_cache=False).logits
    assert [mask is not None for mask in masks] == [layer < hidden for layer in range(2)]  # sliding windows alone
    torch.testing.assert_close(output, expected)
    assert masking_utils.find_packed_sequence_indices is packed
    assert model.config._attn_implementation == "sdpa"


def test_unsupported_options_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fallback(_module: nn.Module, *inputs: Tensor, **options: Any) -> None:
        calls.append((*(each if each is None else tuple(each.shape) for each in inputs), options))

    monkeypatch.setattr(training_mode, "sdpa_attention_forward", fallback)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    query, key, value = states("cpu", 8)
    shapes, mask = tuple(tuple(each.shape) for each in (query, key, value)), torch.ones(1, 1, 8, 8)
    others: list[dict[str, Any]] = [{"softcap": 2.0}, {"dropout": 0.1}, {"is_causal": False}]
    for options in others:
        training_mode._attend(nn.Identity(), query, key, value, None, **options)
    training_mode._attend(nn.Identity(), query, key, value, mask)
    training_mode._attend(nn.Identity(), query[:, :, :1], key, value, None)
    training_mode._attend(nn.Identity(), query.float(), key.float(), value.float(), None)
    assert calls[:3] == [(*shapes, None, options) for options in others]
    assert calls[3:] == [
        (*shapes, (1, 1, 8, 8), {}),
        ((4, 9, 1, 64), *shapes[1:], None, {}),
        (*shapes, None, {}),
    ]


def test_a_failure_restores_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_mode, "_has_flash", lambda device: True)
    model, packed = small_model(small_config("llama")), masking_utils.find_packed_sequence_indices
    with pytest.raises(IndexError), maskless_attention(model, model), fused_norms(model):
        model(torch.tensor([[99999]]))
    assert model.config._attn_implementation == "sdpa"
    assert masking_utils.find_packed_sequence_indices is packed
    assert not any("forward" in vars(module) for module in model.modules())


@on_gpu
@pytest.mark.parametrize("value", [64, 40])
def test_flash_attention_equals_pytorch_and_is_deterministic(value: int) -> None:
    tensors = states("cuda", 700, value)
    module, gradient = nn.Identity(), torch.randn(4, 700, 9, value, device="cuda").bfloat16()

    def run() -> list[Tensor]:
        output, _ = training_mode._attend(module, *tensors, None, scaling=0.1, sliding_window=None, position_ids=None)
        return [output, *torch.autograd.grad(output, tensors, gradient)]

    first = run()
    for _ in range(8):
        torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda")
        assert all(map(torch.equal, run(), first))
    wide = [each.detach().float().requires_grad_() for each in tensors]
    expected = scaled_dot_product_attention(*wide, is_causal=True, scale=0.1, enable_gqa=True).transpose(1, 2)
    exact = expected, *torch.autograd.grad(expected, wide, gradient.float())
    for tensor, other in zip(first, exact, strict=True):
        assert float((tensor.detach().float() - other.detach()).norm() / other.detach().norm()) < 2e-2


@on_gpu
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_the_attention_of_a_model_is_replaced_inside_the_context(model_type: str) -> None:
    model: Any = small_model(small_config(model_type)).cuda()
    ids = torch.arange(40, device="cuda").view(2, 20)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = model(ids, use_cache=False).logits
        with maskless_attention(model):
            assert model.config._attn_implementation == "gac_windows"
            output = model(ids, use_cache=False).logits
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = model(ids, use_cache=False).logits
            graph.replay()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(output, captured)
    assert float((output - expected).norm() / expected.norm()) < 2e-2
