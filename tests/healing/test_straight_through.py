"""What stands for a stored matrix in training is that matrix, to the bit, and gradients pass its rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gac.compression.rounding import store
from gac.healing import straight_through
from gac.healing.straight_through import StraightThrough
from gac.runtime.modules import BlockLinear, ValueLinear
from gac.runtime.plain.modeling_gac import Heads
from gac.runtime.storage.modules import StoredLinear
from gac.schemes import scheme_named
from tests.runtime.interpreted import DEVICE

SCHEMES = ["w8a16", "w4a16", "w4a16:32", "w3a16:16", "w2a16", "w8a8", "fp8"]
TORCH = {"w8a8", "fp8"}


def plain(kind: str) -> Any:
    torch.manual_seed(0)
    made: dict[str, Any] = {
        "linear": lambda: nn.Linear(48, 40),
        "values": lambda: ValueLinear(48, 4, 10, bias=False),
        "blocks": lambda: BlockLinear(4, 12, 10, bias=True),
    }
    module = made[kind]()
    for one in module.parameters():
        nn.init.normal_(one)
    return module.requires_grad_(False)


def pair(scheme: str, kind: str = "linear") -> tuple[StoredLinear, StraightThrough]:
    stored = store(scheme_named(scheme), plain(kind))
    assert isinstance(stored, StoredLinear)
    grid = scheme_named(scheme).grid(stored.tensors, *stored.matrix)
    assert grid is not None
    return stored, StraightThrough(stored, scheme_named(scheme), grid)


def features(y: Any) -> Tensor:
    found: Tensor = y.features if isinstance(y, Heads) else y
    return found


@pytest.mark.parametrize("kind", ["linear", "values", "blocks"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_before_and_after_training_both_say_the_same(scheme: str, kind: str) -> None:
    if kind == "blocks" and scheme in TORCH:
        return  # these multiply no batches
    stored, module = pair(scheme, kind)
    x, before = torch.randn(3, 5, 48), {name: one.clone() for name, one in stored.tensors.items()}
    assert torch.equal(features(module(x)), features(stored(x)))
    assert all(torch.equal(one, before[name]) for name, one in module.store().held.items())
    module.weight.data += 0.3 * torch.randn(module.weight.shape)
    if module.factor is not None:
        module.factor.data *= 1 + 0.1 * torch.randn(module.factor.shape)
    moved = features(module(x))
    assert torch.equal(features(module.store()(x)), moved)
    assert torch.equal(stored.tensors["weight_scale"], before["weight_scale"]) == (module.factor is None)
    assert {name: (one.shape, one.dtype) for name, one in stored.tensors.items()} == {
        name: (one.shape, one.dtype) for name, one in before.items()
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_product_where_a_number_can_move(scheme: str) -> None:
    _, module = pair(scheme)
    module.weight.data[0, 0] = 1e4  # beyond the largest number
    x = torch.randn(5, 48, requires_grad=True)
    (module(x) * torch.arange(40.0)).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad[0, 0] == 0
    due = torch.arange(40.0)[:, None] * x.detach().sum(0)
    within = module.weight.grad != 0
    assert float(within.float().mean()) > 0.8
    error = (module.weight.grad - due)[within].norm() / due.norm()
    assert float(error) < 0.05  # inputs are rounded too
    assert x.grad is not None
    assert (module.factor is None) == (scheme == "fp8")
    assert module.factor is None or bool(module.factor.grad is not None and (module.factor.grad != 0).any())


@pytest.mark.parametrize("size", [16, 48, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_of_a_rounded_matrix_finds_what_pytorch_does(size: int, dtype: torch.dtype) -> None:
    from gac.healing.rounding_kernel import Rounded

    draw = torch.Generator().manual_seed(0)
    columns = 1500
    master = (4 * torch.randn(5, columns, generator=draw)).to(DEVICE).requires_grad_()
    groups = -(-columns // size)
    scale = (0.5 + torch.rand(5, groups, generator=draw)).to(DEVICE).requires_grad_()
    zero = torch.randint(6, 10, (5, groups), generator=draw).float().to(DEVICE)
    wide, shift = (one.repeat_interleave(size, 1)[:, :columns] for one in (scale, zero))
    within = (master / wide + shift).clamp(0, 15)
    number = within + (within.round() - within).detach()
    expected = (within.round().detach() - shift) * wide + (number - number.detach()) * wide.detach()
    by = torch.randn(5, columns, generator=draw).to(DEVICE, dtype)
    found = Rounded.apply(master, scale, zero, size, 0, 15, dtype)
    assert torch.equal(found, expected.detach().to(dtype))
    wanted = torch.autograd.grad(expected, (master, scale), by.float())
    made = torch.autograd.grad(found, (master, scale), by)
    assert (wanted[0] == 0).any()
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "values", "blocks"])
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16:32", "w3a16:16", "w2a16:7", "w8a8"])
def test_a_matrix_is_the_same_by_the_kernel(scheme: str, kind: str, monkeypatch: Any) -> None:
    if kind == "blocks" and scheme in TORCH:
        return
    _, module = pair(scheme, kind)
    module.weight.data += 0.3 * torch.randn(module.weight.shape)
    module.to(DEVICE)
    found = {}
    for runs in (False, True):
        monkeypatch.setattr(straight_through, "kernels_run_on", lambda _, runs=runs: runs)
        values = module._values(torch.float32)
        by = torch.linspace(-1, 1, values.numel(), device=DEVICE).view_as(values)
        found[runs] = values, *torch.autograd.grad(values, (module.weight, module.factor), by)
    assert torch.equal(found[True][0], found[False][0])
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_scales_stay_what_16_bits_hold() -> None:
    _, module = pair("w4a16:32")
    assert module.factor is not None
    module.factor.data *= -1.0  # no scale is below 0
    scale = module.store().held["weight_scale"]
    assert bool((scale > 0).all())
    module.factor.data *= -1.2345
    scale = module.store().held["weight_scale"]
    assert torch.equal(scale.float(), scale.bfloat16().float())


class Silent(type(scheme_named("w8a16"))):  # type: ignore[misc]
    """A scheme that does not say how it is trained."""

    def grid(self, held: Any, rows: int, columns: int) -> None:
        return None


def test_a_scheme_has_a_grid_only_where_it_says_so() -> None:
    assert Silent("silent", 8, None, zero=False).grid({}, 1, 1) is None
