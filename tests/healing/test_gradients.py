"""Gradients: of the distillation loss, accumulated, captured in CUDA graphs, and of fused norms."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, one_hot
from trained import Trained
from transformers import AutoModelForCausalLM

from gac.healing import gradients, losses, run
from gac.healing.gradients import Capturing, Gradients, can_capture
from gac.healing.training_mode import fused_norms
from gac.runtime.fusion.elementwise import Norm
from gac.testing.models import tiny_config
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
    class Captured:
        def __init__(self, run: Any, inputs: Any) -> None:
            self.run = lambda inputs: run(*inputs)
            run(*inputs)  # like the passes that warm up

    monkeypatch.setattr(gradients, "_CapturedPass", Captured)
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
