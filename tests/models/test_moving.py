"""Models on their way to a device."""

import pytest
import torch
from torch import nn

from gac.models import streaming
from gac.models.streaming import moved


class Other(nn.Parameter):
    """A parameter that is more than its numbers."""


def tied() -> nn.Module:
    """Large and small weights, one of them held twice, a buffer, one turned round, and one without numbers."""
    model = nn.Module()
    model.one, model.other, model.small = nn.Linear(600, 700), nn.Linear(700, 600), nn.Linear(3, 5)
    model.again = nn.Linear(600, 700)
    model.again.weight = model.one.weight
    model.turned = nn.Parameter(torch.randn(700, 600).T, requires_grad=False)
    model.register_buffer("packed", torch.randint(-9, 9, (600, 601), dtype=torch.int32))
    model.register_buffer("none", torch.empty(0, 4))
    return model.to(torch.bfloat16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "LARGE", 1 << 10)
    monkeypatch.setattr(streaming, "CHUNK", 1 << 16)
    model = tied()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    there = moved(model, "cuda")
    assert there is model
    assert model.again.weight is model.one.weight
    assert not model.turned.requires_grad
    for name, values in model.state_dict().items():
        assert values.device.type == "cuda"
        assert torch.equal(values.cpu(), before[name])
        assert values.dtype == before[name].dtype


def test_a_cpu_keeps_them() -> None:
    model = tied()
    addresses = [values.data_ptr() for values in model.parameters()]
    assert moved(model, "cpu") is model
    assert [values.data_ptr() for values in model.parameters()] == addresses


def test_large_numbers_that_lie_one_after_the_other_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "LARGE", 1 << 10)
    model = tied()
    model.register_buffer("sparse", torch.eye(600).to_sparse())
    model.register_parameter("other_kind", Other(torch.zeros(600, 600)))
    due = [model.one.weight, model.one.bias, model.other.weight, model.other.bias, model.again.bias, model.packed]
    assert sorted(map(id, streaming._large(model))) == sorted(map(id, due))


def test_pieces_and_small_tensors_fill_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "CHUNK", 1000)
    tensors = [torch.randn(size) for size in (3, 0, 40, 500, 7, 200, 1)]
    copies = [torch.zeros_like(values) for values in tensors]
    for sources, targets in streaming._batches(list(zip(tensors, copies, strict=True))):
        assert 0 < sum(map(len, sources)) <= 1000
        torch._foreach_copy_(targets, sources)
    assert all(map(torch.equal, tensors, copies))
    assert list(streaming._batches([])) == []
