"""Training: gradients and their average, captured passes, fused norms, and attention without masks."""

import copy
import logging
import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, one_hot, scaled_dot_product_attention
from trained import Trained
from transformers import AutoModelForCausalLM, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import import_utils

from gac.healing import gradients, losses, run, training_mode
from gac.healing.gradients import Capturing, Gradients, can_capture
from gac.healing.training_mode import fused_norms, maskless_attention
from gac.runtime.fusion.elementwise import Norm
from gac.testing.models import tiny_config
from tests.distributed import work
from tests.distributed.herd import Ended, together
from tests.models.small import small_config, small_model
from tests.runtime.interpreted import DEVICE


@pytest.mark.parametrize("rows", [3, 64])
def test_the_gradient_of_the_divergence(rows: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(losses, "FLOAT32_LOGITS", rows * 20)
    logits, teacher = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))
    exact, ours = (logits.clone().requires_grad_() for _ in range(2))
    divergence = kl_div(exact.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum")
    (divergence / 3).backward()
    summed = losses.distillation_loss(ours, teacher, torch.ones(8), torch.zeros(8, dtype=torch.long))
    (summed / 3).backward()
    assert summed.item() == pytest.approx(divergence.item(), rel=1e-5)
    torch.testing.assert_close(ours.grad, exact.grad)


def test_labels_weigh_the_next_token() -> None:
    """Except after the last token of a window."""
    dense, model = (AutoModelForCausalLM.from_config(tiny_config()).float() for _ in range(2))
    ids = torch.randint(dense.config.vocab_size, (3, 6), generator=torch.Generator().manual_seed(0))
    shares = torch.tensor([[0.25], [0.0], [0.5]])
    log_q, log_p = (each(input_ids=ids).logits.log_softmax(-1) for each in (model, dense))
    divergence = kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    missed = cross_entropy(log_q[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    expected = divergence[:, -1].sum() + ((1 - shares) * divergence[:, :-1] + shares * missed).sum()
    weights = list(model.parameters())
    exact = torch.autograd.grad(expected, weights)
    assert losses.summed_loss(model, dense, ids).item() == pytest.approx(divergence.sum().item(), rel=1e-5)
    summed = losses.summed_loss(model, dense, ids, shares[:, 0])
    assert summed.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(torch.autograd.grad(summed, weights), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [20, 5000])
def test_the_kernel_of_the_divergence_equals_pytorch(size: int) -> None:
    from gac.healing import triton_kernels

    draw = torch.Generator().manual_seed(0)
    logits, teacher = ((4 * torch.randn(3, 2 * size, generator=draw)).to(DEVICE) for _ in range(2))
    logits, teacher = logits[:, :size], teacher[:, size:]  # rows are not adjacent
    exact = logits.clone().requires_grad_()
    expected = kl_div(exact.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    expected.sum().backward()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        inputs, scale = (logits.to(dtype), teacher.to(dtype)), torch.tensor(0.5, device=DEVICE)
        kl, log_sums = triton_kernels.kl_divergence(*inputs)
        torch.testing.assert_close(kl, expected.detach(), rtol=tolerance, atol=1e-6)
        weight, labels = torch.tensor([1.0, 0.75, 0.0], device=DEVICE), torch.tensor([7, 11, 3], device=DEVICE)
        by_labels = (1 - weight)[:, None] * (logits.softmax(-1) - one_hot(labels, size))
        gradient = triton_kernels.kl_gradient(*inputs, log_sums, weight, labels, scale)
        wanted = ((weight[:, None] * exact.grad + by_labels) / 2).to(dtype)
        torch.testing.assert_close(gradient, wanted, rtol=20 * tolerance, atol=tolerance)


def weight_and_loss(device: str = "cpu") -> tuple[nn.Parameter, Any]:
    weight = nn.Parameter(torch.linspace(-1, 1, 12, device=device).view(3, 4))

    def loss(x: Tensor, by: Tensor) -> Tensor:
        return (x @ weight).tanh().square().sum() / by

    return weight, loss


@pytest.mark.parametrize("captures", [False, True])
def test_gradients_of_several_parts_add_up(captures: bool, caplog: Any, monkeypatch: Any) -> None:
    def refused(run: Any, inputs: Any) -> None:
        run(*inputs)
        raise NotImplementedError

    monkeypatch.setattr(gradients, "_CapturedPass", refused)  # then the passes run as they are
    weight, loss = weight_and_loss()
    accumulated = Gradients(loss, [weight], Capturing(captures))
    with caplog.at_level(logging.INFO):
        for step in (1.0, 2.0):
            accumulated.zero()
            parts = [torch.full((2, 3), value) for value in (step, step + 1)]
            total = sum(float(accumulated.add(part, torch.tensor(4.0))) for part in parts)
            other, same = weight_and_loss()
            expected = same(parts[0], 4) + same(parts[1], 4)
            expected.backward()
            assert total == pytest.approx(expected.item())
            torch.testing.assert_close(weight.grad, other.grad)
            weight.grad = None
    assert caplog.text.count("steps are not captured in a CUDA graph, and take longer: NotImplementedError") == captures


def test_capturing_adds_no_gradients(monkeypatch: Any) -> None:
    def captured(run: Any, inputs: Any) -> Any:
        run(*inputs)  # like the passes that warm up
        return SimpleNamespace(run=lambda inputs: run(*inputs))

    monkeypatch.setattr(gradients, "_CapturedPass", captured)
    weight, loss = weight_and_loss()
    accumulated = Gradients(loss, [weight], Capturing(True))
    accumulated.zero()
    buffer = weight.grad
    for rows in (2, 3):  # two shapes, each captured when it first occurs
        accumulated.add(torch.ones(rows, 3), torch.tensor(1.0))
    other, same = weight_and_loss()
    (same(torch.ones(2, 3), 1) + same(torch.ones(3, 3), 1)).backward()
    torch.testing.assert_close(weight.grad, other.grad)
    accumulated.zero()
    assert weight.grad is buffer
    assert not buffer.any()


def test_large_models_and_models_on_a_cpu_are_not_captured(tiny_model: Any, monkeypatch: Any) -> None:
    assert not can_capture(tiny_model)
    with maskless_attention(tiny_model, tiny_model):  # nor has it another attention
        assert tiny_model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert can_capture(tiny_model, copy.deepcopy(tiny_model))
    monkeypatch.setattr(gradients, "LARGE", 1000)
    assert not can_capture(tiny_model)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_gpu
def test_capturing_does_not_change_the_result(learned: Trained, monkeypatch: Any) -> None:
    states = []
    for captured in (True, True, False):
        monkeypatch.setattr(run, "can_capture", can_capture if captured else lambda *_models: False)
        small = learned.heal(learned.compressed().cuda(), against=copy.deepcopy(learned.model).cuda())
        states.append({name: values.cpu() for name, values in small.state_dict().items()})
    for other in states[1:]:
        assert [name for name, values in states[0].items() if not torch.equal(values, other[name])] == []


@on_gpu
@pytest.mark.parametrize("device", range(torch.cuda.device_count()))
def test_a_pass_that_waits_for_its_gpu_is_not_captured(device: int) -> None:
    weight, loss = weight_and_loss(f"cuda:{device}")
    inputs = torch.ones(2, 3, device=weight.device), torch.tensor(2.0)
    results, waiting = [], Capturing(True)
    passes = ((loss, Capturing(True)), (lambda *tensors: loss(*tensors) * float(weight.sum() + 1), waiting))
    for function, capturing in passes:
        accumulated = Gradients(function, [weight], capturing)
        accumulated.zero()
        results.append((float(accumulated.add(*inputs)), weight.grad.clone()))
        weight.grad = None
    loss(*inputs).backward()
    assert not waiting.enabled
    assert results[0][0] > 0
    assert torch.equal(results[0][1], weight.grad)
    torch.testing.assert_close(results[1][1], weight.grad)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_fused_norms_compute_the_same_and_are_removed(model_type: str) -> None:
    model = small_model(small_config(model_type)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    norms = [module for name, module in model.named_modules() if name.endswith("norm")]
    norms[0].forward = ours = Norm(norms[0], model_type.partition("3")[0])
    norms[1].forward = hook = norms[1].forward  # like a hook of accelerate
    ids = torch.arange(12).view(1, 12)
    expected = model(ids).logits
    with fused_norms(model, model):  # each is replaced once
        assert all("forward" in vars(module) for module in norms)
        assert norms[0].forward is not ours
        assert norms[1].forward is hook
        logits = model(ids).logits
        logits.sum().backward()
        states = torch.randn(2, norms[0].weight.numel()).bfloat16()
        assert torch.equal(norms[0].forward(states), ours(states))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert all(norm.weight.grad is not None for norm in norms)
    assert norms[0].forward is ours
    assert norms[1].forward is hook
    assert not any("forward" in vars(module) for module in model.modules() if module not in norms[:2])


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    assert together(2, work.every_check, tmp_path / "home", tmp_path) == Ended([0, 0], ["", ""], ["", ""])
    for rank in range(2):
        weight, bias, *mixed = torch.load(tmp_path / f"averaged-{rank}.pt")
        assert weight.unique().tolist() == [((2 * 1 + 0) + (2 * 2 + 10)) / 2]
        assert bias.unique().tolist() == [3]
        assert [tensor.unique().tolist() for tensor in mixed] == [[0.5]] * len(mixed)
        assert [tensor.dtype for tensor in mixed] == [dtype for _, dtype in work.SIZES]
        # No process captures the shape that the second one cannot.
        assert torch.load(tmp_path / f"captured-{rank}.pt") == ([[3.0] * 3, [4.5] * 3, [4.5] * 3], False)


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
    fallback, module = Mock(), nn.Identity()
    monkeypatch.setattr(training_mode, "sdpa_attention_forward", fallback)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    query, key, value = states("cpu", 8)
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        *(
            ((query, key, value, None), options)
            for options in ({"softcap": 2.0}, {"dropout": 0.1}, {"is_causal": False})
        ),
        ((query, key, value, torch.ones(1, 1, 8, 8)), {}),
        ((query[:, :, :1], key, value, None), {}),
        ((query.float(), key.float(), value.float(), None), {}),
    ]
    for number, (inputs, options) in enumerate(others, 1):
        training_mode._attend(module, *inputs, **options)
        assert fallback.call_count == number
        assert all(map(operator.is_, fallback.call_args.args, (module, *inputs)))
        assert fallback.call_args.kwargs == options


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
