"""A stored matrix in training is bit for bit the stored one, and has straight-through gradients."""

from typing import Any

import pytest
import torch
from torch import nn

from gac.compression.rounding import store
from gac.healing import straight_through
from gac.healing.straight_through import StraightThrough
from gac.runtime.modules import BlockLinear, ValueLinear
from gac.runtime.storage.modules import StoredLinear
from gac.schemes import scheme_named
from tests.runtime.interpreted import DEVICE, features

FLOATING = ["fp8", "fp8_block", "nvfp4a16", "mxfp4a16"]
SCHEMES = ["w8a16", "w4a16:32", "w3a16:16", "w2a16", "w8a8", *FLOATING]
TORCH = {"w8a8", "fp8", "fp8_block"}


def plain(kind: str) -> Any:
    torch.manual_seed(0)
    module: Any = {
        "linear": lambda: nn.Linear(48, 40),
        "values": lambda: ValueLinear(48, 4, 10, bias=False),
        "blocks": lambda: BlockLinear(4, 12, 10, bias=True),
    }[kind]()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.requires_grad_(False)


def pair(scheme: str, kind: str = "linear") -> tuple[StoredLinear, StraightThrough]:
    stored = store(scheme_named(scheme), plain(kind))
    assert isinstance(stored, StoredLinear)
    grid = scheme_named(scheme).grid(stored.tensors, *stored.matrix)
    assert grid is not None
    return stored, StraightThrough(stored, scheme_named(scheme), grid)


def in_kinds(*schemes: str) -> list[tuple[str, str]]:
    """Schemes and kinds of modules; those of PyTorch multiply no batches."""
    kinds = ("linear", "values", "blocks")
    return [(scheme, kind) for scheme in schemes for kind in kinds if kind != "blocks" or scheme not in TORCH]


@pytest.mark.parametrize(("scheme", "kind"), in_kinds(*SCHEMES))
def test_the_module_equals_the_stored_matrix_before_and_after_training(scheme: str, kind: str) -> None:
    stored, module = pair(scheme, kind)
    x, before = torch.randn(3, 5, 48), {name: values.clone() for name, values in stored.tensors.items()}
    assert torch.equal(features(module(x)), features(stored(x)))
    assert all(torch.equal(values, before[name]) for name, values in module.store().tensors.items())
    module.weight.data += 0.3 * torch.randn(module.weight.shape)
    if module.factor is not None:
        module.factor.data *= 1 + 0.1 * torch.randn(module.factor.shape)
    moved = features(module(x))
    assert torch.equal(features(module.store()(x)), moved)
    assert torch.equal(stored.tensors["weight_scale"], before["weight_scale"]) == (module.factor is None)
    kinds = [{name: (each.shape, each.dtype) for name, each in tensors.items()} for tensors in (stored.tensors, before)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_product_inside_the_range(scheme: str) -> None:
    _, module = pair(scheme)
    module.weight.data[0, 0] = 1e4  # beyond the largest number
    x = torch.randn(5, 48, requires_grad=True)
    (module(x) * torch.arange(40.0)).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad[0, 0] == 0
    expected = torch.arange(40.0)[:, None] * x.detach().sum(0)
    within = module.weight.grad != 0
    assert float(within.float().mean()) > 0.8
    error = (module.weight.grad - expected)[within].norm() / expected.norm()
    assert float(error) < 0.05  # inputs are quantised too
    assert x.grad is not None
    assert (module.factor is None) == (scheme in FLOATING)
    assert module.factor is None or bool(module.factor.grad is not None and (module.factor.grad != 0).any())


@pytest.mark.parametrize(
    ("size", "columns", "dtype"), [(16, 96, torch.float32), (48, 100, torch.float16), (1500, 1500, torch.float32)]
)
def test_the_kernel_equals_pytorch(size: int, columns: int, dtype: torch.dtype) -> None:
    from gac.healing.triton_kernels import FakeQuantize

    draw = torch.Generator().manual_seed(0)
    master = (4 * torch.randn(5, columns, generator=draw)).to(DEVICE).requires_grad_()
    groups = -(-columns // size)
    scale = (0.5 + torch.rand(5, groups, generator=draw)).to(DEVICE).requires_grad_()
    zero = torch.randint(6, 10, (5, groups), generator=draw).float().to(DEVICE)
    wide, shift = (each.repeat_interleave(size, 1)[:, :columns] for each in (scale, zero))
    within = (master / wide + shift).clamp(0, 15)
    number = within + (within.round() - within).detach()
    expected = (within.round().detach() - shift) * wide + (number - number.detach()) * wide.detach()
    by = torch.randn(5, columns, generator=draw).to(DEVICE, dtype)
    values = FakeQuantize.apply(master, scale, zero, size, 0, 15, dtype)
    assert torch.equal(values, expected.detach().to(dtype))
    exact = torch.autograd.grad(expected, (master, scale), by.float())
    assert (exact[0] == 0).any()
    torch.testing.assert_close(torch.autograd.grad(values, (master, scale), by), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("scheme", "kind"), in_kinds("w4a16:32", "w2a16:7", "w8a8"))
def test_a_module_is_the_same_with_the_kernel(scheme: str, kind: str, monkeypatch: Any) -> None:
    _, module = pair(scheme, kind)
    module.weight.data += 0.3 * torch.randn(module.weight.shape)
    module.to(DEVICE)
    results = {}
    for runs in (False, True):
        monkeypatch.setattr(straight_through, "kernels_run_on", lambda _, runs=runs: runs)
        values = module.quantized_weight(torch.float32)
        by = torch.linspace(-1, 1, values.numel(), device=DEVICE).view_as(values)
        results[runs] = values, *torch.autograd.grad(values, (module.weight, module.factor), by)
    assert torch.equal(results[True][0], results[False][0])
    torch.testing.assert_close(results[True], results[False], rtol=1e-4, atol=1e-4)


def test_scales_fit_in_16_bits() -> None:
    _, module = pair("w4a16:32")
    assert module.factor is not None
    module.factor.data *= -1.0  # no scale is below 0
    scale = module.store().tensors["weight_scale"]
    assert bool((scale > 0).all())
    module.factor.data *= -1.2345
    scale = module.store().tensors["weight_scale"]
    assert torch.equal(scale.float(), scale.bfloat16().float())
