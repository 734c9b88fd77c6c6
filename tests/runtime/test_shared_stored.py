"""Stored weights that share a GEMM: the same outputs, the same tensors under the same names, one product."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gac.runtime.fusion.shared_gemm import can_share, share_gemm
from gac.runtime.storage.base import Storage
from gac.runtime.storage.modules import StoredLinear
from gac.schemes import scheme_named
from gac.schemes.base import storage_of

IN = 64


class Layer(nn.Module):
    """Three weights of one input, of 40, 24 and 16 outputs, the second with a bias."""

    def __init__(self, scheme: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, rows in (("q", 40), ("k", 24), ("v", 16)):
            matrix = torch.randn(rows, IN, generator=generator)
            storage = storage_of(scheme_named(scheme))
            assert storage is not None
            weight = StoredLinear(storage, nn.Linear(IN, rows, bias=name == "k").requires_grad_(False))
            weight.fill(scheme_named(scheme).stored(matrix))
            setattr(self, name, weight)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.q(x), self.k(x), self.v(x)]


def shared(layer: Layer) -> Layer:
    found = copy.deepcopy(layer)
    share_gemm(found, ["q", "k", "v"])
    return found


def close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.allclose(one, other, atol=1e-5) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scheme", ["fp8", "w8a8", "w4a16:32", "w3a16:24"])
def test_outputs_and_tensors_are_those_of_weights_apart(scheme: str) -> None:
    layer, x = Layer(scheme), torch.randn(2, 3, IN)
    found = shared(layer)
    assert close(found(x), layer(x))
    ours, theirs = found.state_dict(), layer.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each matrix that is multiplied."""
    found: list[int] = []
    multiply = Storage.multiply

    def counted(self: Storage, x: Tensor, held: Any, rows: int, columns: int, bias: Tensor | None) -> Tensor:
        found.append(rows)
        return multiply(self, x, held, rows, columns, bias)

    monkeypatch.setattr(Storage, "multiply", counted)
    return found


@pytest.mark.parametrize(("scheme", "rows"), [("w4a16", 16 + 24 + 40), ("w3a16", 64 + 40)])
def test_one_product_gives_all_outputs(scheme: str, rows: int, products: list[int]) -> None:
    """Parts begin with a whole word: 32 rows of zero points of 3 bits have three words."""
    layer = shared(Layer(scheme))
    layer(torch.randn(1, IN))
    assert products == [rows]
    sizes = [sum(one.numel() for one in weight.counted.values()) for weight in (layer.k, Layer(scheme).k)]
    assert sizes[0] == sizes[1]


def test_long_parts_run_apart(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gac.runtime.contract._ENOUGH_OUTPUTS", 30 * 2)
    layer, x = Layer("w4a16"), torch.randn(2, IN)
    assert close(shared(layer)(x), layer(x))
    assert products[:2] == [40, 16 + 24]


def test_it_stays_joined_wherever_the_model_goes() -> None:
    layer = shared(Layer("w4a16"))
    held = layer.q.get_buffer("weight_packed").untyped_storage().data_ptr()
    for moved in (layer, layer.bfloat16(), copy.deepcopy(layer)):
        places = {one.get_buffer("weight_packed").untyped_storage().data_ptr() for one in (moved.q, moved.k, moved.v)}
        assert len(places) == 1
    assert layer.q.get_buffer("weight_packed").untyped_storage().data_ptr() == held
    assert layer(torch.randn(1, IN).bfloat16())[0].dtype == torch.bfloat16


def test_other_tensors_are_joined_anew() -> None:
    layer, other, x = shared(Layer("w4a16")), Layer("w4a16"), torch.randn(1, IN)
    nn.init.zeros_(layer.k.bias)
    for one in (layer.q, layer.k, layer.v):
        one.get_buffer("weight_packed").zero_()
    assert not close(layer(x), other(x))
    layer.load_state_dict(other.state_dict())
    assert close(layer(x), other(x))
    layer.q.fill({name: torch.zeros_like(one) for name, one in other.q.tensors.items()})
    assert not layer(x)[0].any()
    assert close(layer(x)[1:], other(x)[1:])


def test_compiled_it_is_one_graph() -> None:
    layer, x = shared(Layer("w4a16")), torch.randn(1, IN)
    with torch.no_grad():
        found = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert close(found, layer(x))


def test_only_what_lies_in_equal_storages_can_share() -> None:
    four, eight, plain = Layer("w4a16").q, Layer("w8a16").q, nn.Linear(IN, 8)
    assert can_share([four, Layer("w4a16").k])
    assert can_share([plain, nn.Linear(IN, 4)])
    assert not can_share([four, eight])
    assert not can_share([plain, four])
    assert not can_share([four, None])
