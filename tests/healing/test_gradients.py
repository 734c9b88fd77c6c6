"""Gradients of a loss: made with it, captured where a GPU can, and of norms that run in one kernel."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, one_hot
from trained import Trained
from transformers import AutoConfig, AutoModelForCausalLM

from gac.healing import gradients, healing, plain_divergence
from gac.healing import logits as logits_of
from gac.healing.gradients import Captures, Gradients, can_be_captured
from gac.healing.launches import in_one_launch
from gac.runtime.fusion.elementwise import Norm
from gac.testing.models import tiny_config
from tests.runtime.interpreted import DEVICE


@pytest.mark.parametrize("rows", [3, 64])
def test_the_gradient_of_a_divergence_is_its_own(rows: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(plain_divergence, "IN_FLOAT32", rows * 20)
    found, due = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))
    exact, made = (found.clone().requires_grad_() for _ in range(2))
    divergence = kl_div(exact.log_softmax(-1), due.log_softmax(-1), log_target=True, reduction="sum")
    (divergence / 3).backward()
    summed = logits_of._Loss.apply(made, due, torch.ones(8), torch.zeros(8, dtype=torch.long))
    (summed / 3).backward()
    assert summed.item() == pytest.approx(divergence.item(), rel=1e-5)
    torch.testing.assert_close(made.grad, exact.grad)


def test_a_part_of_the_loss_is_the_next_token() -> None:
    """But not behind a window's last token, and in no window that has no such part."""
    dense, model = (AutoModelForCausalLM.from_config(tiny_config()).float() for _ in range(2))
    ids = torch.randint(dense.config.vocab_size, (3, 6), generator=torch.Generator().manual_seed(0))
    parts = torch.tensor([[0.25], [0.0], [0.5]])
    found, due = (one(input_ids=ids).logits.log_softmax(-1) for one in (model, dense))
    divergence = kl_div(found, due, log_target=True, reduction="none").sum(-1)
    missed = cross_entropy(found[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    expected = divergence[:, -1].sum() + ((1 - parts) * divergence[:, :-1] + parts * missed).sum()
    weights = list(model.parameters())
    exact = torch.autograd.grad(expected, weights)
    assert logits_of.summed_loss(model, dense, ids).item() == pytest.approx(divergence.sum().item(), rel=1e-5)
    summed = logits_of.summed_loss(model, dense, ids, parts[:, 0])
    assert summed.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(torch.autograd.grad(summed, weights), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [20, 2048, 5000])
def test_the_kernel_of_a_divergence_finds_what_pytorch_does(size: int) -> None:
    from gac.healing import divergence_kernel

    draw = torch.Generator().manual_seed(0)
    found, due = ((4 * torch.randn(3, 2 * size, generator=draw)).to(DEVICE) for _ in range(2))
    found, due = found[:, :size], due[:, size:]  # rows lie apart
    exact = found.clone().requires_grad_()
    expected = kl_div(exact.log_softmax(-1), due.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    expected.sum().backward()
    for dtype, off in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        given, by = (found.to(dtype), due.to(dtype)), torch.tensor(0.5, device=DEVICE)
        sums, logs = divergence_kernel.divergences(*given)
        torch.testing.assert_close(sums, expected.detach(), rtol=off, atol=1e-6)
        kept, labels = torch.tensor([1.0, 0.75, 0.0], device=DEVICE), torch.tensor([7, 11, 3], device=DEVICE)
        rest = (1 - kept)[:, None] * (found.softmax(-1) - one_hot(labels, size))
        gradient = divergence_kernel.gradient(*given, logs, kept, labels, by)
        wanted = (kept[:, None] * exact.grad + rest) / 2
        torch.testing.assert_close(gradient, wanted.to(dtype), rtol=20 * off, atol=off)


def weight_and_loss(device: str = "cpu") -> tuple[nn.Parameter, Any]:
    weight = nn.Parameter(torch.linspace(-1, 1, 12, device=device).view(3, 4))

    def loss(x: Tensor, by: Tensor) -> Tensor:
        return (x @ weight).tanh().square().sum() / by

    return weight, loss


@pytest.mark.parametrize("captures", [False, True])
def test_gradients_of_several_parts_add_up(captures: bool, caplog: Any, monkeypatch: Any) -> None:
    def refused(run: Any, given: Any) -> None:
        run(*given)
        raise NotImplementedError

    monkeypatch.setattr(gradients, "_Captured", refused)  # then they run as they are
    weight, loss = weight_and_loss()
    found = Gradients(loss, [weight], Captures(captures))
    with caplog.at_level(logging.INFO):
        for step in (1.0, 2.0):
            found.begin()
            sums = sum(float(found.add(torch.full((2, 3), at), torch.tensor(4.0))) for at in (step, step + 1))
            other, same = weight_and_loss()
            due = same(torch.full((2, 3), step), 4) + same(torch.full((2, 3), step + 1), 4)
            due.backward()
            assert sums == pytest.approx(due.item())
            torch.testing.assert_close(weight.grad, other.grad)
            weight.grad = None
    assert caplog.text.count("steps are not captured in a CUDA graph, and take longer: NotImplementedError") == captures


def test_what_is_captured_adds_nothing_by_being_captured(monkeypatch: Any) -> None:
    weight, loss = weight_and_loss()

    class Captured:
        def __init__(self, run: Any, given: Any) -> None:
            self.run = lambda given: run(*given)
            run(*given)  # as the runs that warm up do

    monkeypatch.setattr(gradients, "_Captured", Captured)
    found = Gradients(loss, [weight], Captures(True))
    found.begin()
    held = weight.grad
    for rows in (2, 3):  # two shapes, each captured when it is met
        found.add(torch.ones(rows, 3), torch.tensor(1.0))
    other, same = weight_and_loss()
    (same(torch.ones(2, 3), 1) + same(torch.ones(3, 3), 1)).backward()
    torch.testing.assert_close(weight.grad, other.grad)
    assert weight.grad is held
    found.begin()
    assert weight.grad is held
    assert not held.any()


def test_large_models_and_those_without_a_gpu_are_not_captured(tiny_model: Any, monkeypatch: Any) -> None:
    assert not can_be_captured(tiny_model)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert can_be_captured(tiny_model, copy.deepcopy(tiny_model))
    monkeypatch.setattr(gradients, "CHECKPOINTED", 1000)
    assert not can_be_captured(tiny_model)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_gpu
def test_a_healing_is_the_same_whether_its_steps_are_captured(learned: Trained, monkeypatch: Any) -> None:
    states = []
    for captured in (True, True, False):
        monkeypatch.setattr(healing, "can_be_captured", can_be_captured if captured else lambda *_models: False)
        small = learned.heal(learned.compressed().cuda(), against=copy.deepcopy(learned.model).cuda())
        states.append({name: one.cpu() for name, one in small.state_dict().items()})
    for other in states[1:]:
        assert [name for name, one in states[0].items() if not torch.equal(one, other[name])] == []


@on_gpu
@pytest.mark.parametrize("device", range(torch.cuda.device_count()))
def test_a_run_that_waits_for_its_gpu_is_not_captured_and_goes_on(device: int) -> None:
    weight, loss = weight_and_loss(f"cuda:{device}")
    given = torch.ones(2, 3, device=weight.device), torch.tensor(2.0)
    found, waits = [], Captures(True)
    for run, captures in ((loss, Captures(True)), (lambda *one: loss(*one) * float(weight.sum() + 1), waits)):
        made = Gradients(run, [weight], captures)
        made.begin()
        found.append((float(made.add(*given)), weight.grad.clone()))
        weight.grad = None
    loss(*given).backward()
    assert not waits.on
    assert found[0][0] > 0
    assert torch.equal(found[0][1], weight.grad)
    torch.testing.assert_close(found[1][1], weight.grad)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_norms_in_one_kernel_find_what_they_find_and_are_put_back(model_type: str) -> None:
    sizes = tiny_config().to_dict() | {"head_dim": 16, "layer_types": None, "rope_parameters": None}
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    named = {name: sizes[name] for name in (*kept, "num_key_value_heads", "head_dim")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **named)).eval()
    for one in model.parameters():
        if one.dim() == 1:
            nn.init.normal_(one, 1.0, 0.3)
    norms = [one for name, one in model.named_modules() if name.endswith("norm")]
    norms[0].forward = own = Norm(norms[0], model_type.partition("3")[0])
    norms[1].forward = others = norms[1].forward  # as a hook of accelerate
    ids = torch.arange(12).view(1, 12)
    due = model(ids).logits
    with in_one_launch(model, model):  # each is met twice
        assert all("forward" in vars(one) for one in norms)
        assert norms[0].forward is not own
        assert norms[1].forward is others
        found = model(ids).logits
        found.sum().backward()
        states = torch.randn(2, norms[0].weight.numel()).bfloat16()
        assert torch.equal(norms[0].forward(states), own(states))
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5)
    assert all(one.weight.grad is not None for one in norms)
    assert norms[0].forward is own
    assert norms[1].forward is others
    assert not any("forward" in vars(one) for one in norms[2:])
    assert not any("forward" in vars(one) for one in model.modules() if one not in norms)
