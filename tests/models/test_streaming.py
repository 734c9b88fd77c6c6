"""Models on their way to a device, and those whose weights come as they run; the CPU stands in for a GPU."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gac.core.errors import ModelError
from gac.models import streaming
from gac.models.streaming import FULL, moved, on_its_device, placed, spread, streamed
from tests.compression.applying import logits
from tests.small_pipeline import Small, has_state, state_of

accelerate = pytest.importorskip("accelerate")


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
    before = state_of(model)
    assert moved(model, "cuda") is model
    assert model.again.weight is model.one.weight
    assert not model.turned.requires_grad
    assert {values.device.type for values in model.state_dict().values()} == {"cuda"}
    assert has_state(model.cpu(), before)
    assert [values.dtype for values in model.state_dict().values()] == [values.dtype for values in before.values()]


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


def test_the_plan_is_that_of_the_model_in_memory(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, dense = small.allocate(0.7), logits(small.model)
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "own"))
    model = streamed(copy.deepcopy(small.model), "cpu")
    assert all(values.is_meta for values in model.parameters())
    assert torch.equal(logits(model), dense)
    assert small.allocate(0.7, model=model) == plan
    assert all(values.is_meta for values in model.parameters())


def test_a_layer_is_there_until_all_windows_have_run(tiny_model: LlamaForCausalLM) -> None:
    hidden = torch.randn(1, 3, 64)
    rotary = tiny_model.model.rotary_emb(hidden, torch.arange(3)[None])
    expected = tiny_model.model.layers[0](hidden, position_embeddings=rotary)
    layer = streamed(tiny_model, "cpu").model.layers[0]
    with on_its_device(layer):
        first = layer.mlp.up_proj.weight
        output = layer(hidden, position_embeddings=rotary)
        assert layer.mlp.up_proj.weight is first
        assert not any(values.is_meta for values in layer.parameters())
    assert torch.equal(output, expected)
    assert all(values.is_meta for values in layer.parameters())


def test_a_file_that_is_mapped_is_not_copied(directory: Path) -> None:
    model = streamed(LlamaForCausalLM.from_pretrained(directory), "cpu")
    address = model.lm_head._hf_hook.weights_map["weight"].data_ptr()
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    files = [line[-1] for line in mapped if int(line[0].split("-")[0], 16) <= address < int(line[0].split("-")[1], 16)]
    assert files == [str((directory / "model.safetensors").resolve())]


def test_weights_that_leave_no_room_are_streamed(tiny_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(4 * values.numel() for values in tiny_model.parameters())
    monkeypatch.setattr(streaming, "moved", lambda model, device: ("whole", device))
    monkeypatch.setattr(streaming, "streamed", lambda model, device: ("streamed", device))
    for free, how in ((2 * size, "whole"), (size, "streamed")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, free=free: (free, 10 * size))
        assert placed(tiny_model, torch.device("cuda:1")) == (how, torch.device("cuda:1"))
    monkeypatch.undo()
    monkeypatch.setattr(streaming.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="accelerate"):
        streamed(tiny_model, "cpu")


def test_a_model_that_is_too_large_for_one_gpu_is_spread_over_all(
    tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config.num_hidden_layers = 8
    model, gpus = LlamaForCausalLM(tiny_config), torch.device("cuda")
    size = sum(4 * values.numel() for values in model.parameters())
    monkeypatch.setattr(streaming, "moved", lambda model, device: device)
    monkeypatch.setattr(accelerate, "dispatch_model", lambda model, places: places)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def with_free(free: float) -> None:
        monkeypatch.setattr(streaming, "free_memory", lambda device: free)

    with_free(1.01 * size / FULL)
    assert spread(model, gpus) == gpus
    with_free(0.99 * size / FULL)
    places = spread(model, gpus)
    assert {*places.values()} == {0, 1}
    assert {f"model.layers.{layer}" for layer in range(8)} <= places.keys()
    assert spread(model, torch.device("cuda:1")) == torch.device("cuda:1")
    with_free(0.5 * size)
    with pytest.raises(ModelError, match="2 GPUs with room for 0 GB; expected GPUs whose free memory holds"):
        spread(model, gpus)
