"""Weights that share a GEMM, stored ones too: the same outputs, the same names; what pairs gather of it at once."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from gac.runtime.fusion import shared_gemm
from gac.runtime.fusion.shared_gemm import FusedInput, can_share, share_gemm
from gac.runtime.modules import LowRankLinear
from gac.runtime.parallel.ranks import Ranks
from gac.runtime.storage.base import Storage
from gac.runtime.storage.modules import StoredLinear
from gac.schemes import scheme_named
from gac.schemes.base import storage_of
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


READ, SIZE = 16, 2


class Meeting:
    """Where processes, which are threads here, leave what they have for the others; ``widths``: of each gather."""

    def __init__(self) -> None:
        self.barrier, self.left, self.widths = threading.Barrier(SIZE), [torch.empty(0)] * SIZE, list[int]()


@dataclass(frozen=True, eq=False)
class Threads(Ranks):
    """Processes that meet."""

    meeting: Meeting

    def stacked(self, part: Tensor) -> Tensor:
        self.meeting.left[self.rank] = part
        self.meeting.barrier.wait(20)
        found = torch.stack(self.meeting.left)
        if self.meeting.barrier.wait(20) == 0:
            self.meeting.widths.append(part.shape[-1])
        return found


def weights(dense: int) -> nn.ModuleDict:
    """Pairs of ranks 8 and 12, and a dense weight between them."""
    found = {"q": LowRankLinear(READ, 8, 10), "k": nn.Linear(READ, SIZE * dense), "v": LowRankLinear(READ, 12, 9)}
    for one in nn.ModuleDict(found).parameters():
        nn.init.normal_(one)
    return nn.ModuleDict(found).requires_grad_(False)


def part_of(whole: nn.ModuleDict, ranks: Ranks) -> nn.ModuleDict:
    """What a process has: its rows of first factors, and of the dense weight."""
    model = copy.deepcopy(whole)
    for weight in model.values():
        first = shared_gemm.first_of(weight)
        for parameter in first.parameters():
            parameter.data = parameter.data.chunk(SIZE)[ranks.rank].clone()
        first.out_features //= SIZE
        if isinstance(weight, LowRankLinear):
            weight.gathers_from = ranks
    share_gemm(model, ["q", "k", "v"])
    return model


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("dense", "apart", "gathers"),
    [
        (6, 100, [4 + 6]),  # between both in the GEMM
        (20, 100, [4 + 6]),  # behind them
        (20, 6, [4, 6]),  # the second pair's part runs by itself
    ],
)
def test_what_pairs_gather_from_one_gemm_is_gathered_at_once(
    dense: int, apart: int, gathers: list[int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_gemm, "apart_from", lambda rows: apart)
    whole, meeting, inputs = weights(dense), Meeting(), torch.randn(2, 1, rows, READ)
    models = [part_of(whole, Threads(None, rank, SIZE, torch.device("cpu"), meeting)) for rank in range(SIZE)]
    for x in inputs:
        meeting.widths.clear()
        with ThreadPoolExecutor(SIZE) as threads:
            found = list(threads.map(lambda model, x=x: [one(x) for one in model.values()], models))
        assert meeting.widths == gathers
        for rank, ours in enumerate(found):
            due = whole["q"](x), whole["k"](x).chunk(SIZE, -1)[rank], whole["v"](x)
            torch.testing.assert_close(ours, [*due])


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


@pytest.mark.parametrize("scheme", ["fp8", "w8a8", "fp8_block", "w4a16:32", "w3a16:24"])
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


@pytest.mark.parametrize(("scheme", "rows"), [("w4a16", 16 + 24 + 40), ("w3a16", 64 + 40), ("fp8_block", 256 + 40)])
def test_one_product_gives_all_outputs(scheme: str, rows: int, products: list[int]) -> None:
    """Parts begin with a whole word: 32 rows of zero points of 3 bits have three words; or with a block of 128."""
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
