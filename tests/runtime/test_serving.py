"""What servers find in a compressed model: vLLM's Transformers backend, and ``transformers serve``."""

import inspect
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gac.plan.plan import Plan
from gac.runtime.model import CompressedModel, show_to_serve
from tests.compression.applying import logits
from tests.compression.compressed import WIDTH, compressed, small_compressed
from tests.compression.stored import stored
from tests.models.small import every_family, small_config, small_model

GATE, UP, DOWN = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
MakePlan = Callable[..., Plan]
Build = Callable[[Any], Any]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As much of vLLM as a model can see while it is built."""
    backend = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 1)
    monkeypatch.setitem(sys.modules, "vllm.distributed", backend)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "vllm", ALL_ATTENTION_FUNCTIONS["sdpa"])
    return backend


def built_for_vllm(model: Any) -> Any:
    config = type(model.config)(**model.config.to_dict())
    config._attn_implementation = "vllm"
    return type(model)(config).eval()


def in_layers(model: Any, changes: dict[int, list[str]], make_plan: MakePlan) -> Any:
    return compressed(
        model,
        make_plan,
        {f"model.layers.{layer}.{name}": ("low_rank", 16) for layer, names in changes.items() for name in names},
    )


def children(model: Any, layer: int) -> set[str]:
    return {name for name, _ in model.get_submodule(f"model.layers.{layer}.mlp").named_children()}


def test_modules_with_other_weights_are_no_longer_alike(vllm: Any, make_plan: MakePlan) -> None:
    config = small_config("llama", num_hidden_layers=4)
    model = in_layers(small_model(config), {1: [GATE], 2: [GATE], 3: [GATE, UP]}, make_plan)
    built = built_for_vllm(model)
    dense = {"gate_proj", "up_proj", "down_proj", "act_fn"}
    assert children(built, 0) == dense
    assert children(built, 1) == children(built, 2) == dense | {"with_gate_proj_LowRankLinear"}
    assert children(built, 3) == dense | {"with_gate_proj_LowRankLinear_up_proj_LowRankLinear"}
    assert children(model, 1) == dense


def test_a_narrower_weight_is_as_linear_as_before(vllm: Any, make_plan: MakePlan) -> None:
    narrower = {f"model.layers.1.{name}": ("narrow", WIDTH) for name in (GATE, UP, DOWN)}
    model = compressed(small_model(small_config("llama")), make_plan, narrower)
    built = built_for_vllm(model)
    assert children(built, 1) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
    assert set(built.state_dict()) == set(model.state_dict())


def as_two_read_it(vllm: Any, model: Any) -> dict[str, str]:
    """How vLLM is told to split it over two GPUs, by names in the model without a head."""
    vllm.get_tensor_model_parallel_world_size = lambda: 2
    vllm.get_tensor_model_parallel_rank = lambda: 1
    told = as_vllm_reads(model).tp_plan
    return {re.sub(r"\\(.)", r"\1", name).removesuffix("$"): style for name, style in told.items()}


def test_vllm_is_told_how_factors_are_split(vllm: Any, make_plan: MakePlan) -> None:
    model = in_layers(small_model(small_config("llama")), {1: [GATE, DOWN, "self_attn.q_proj"]}, make_plan)
    told = as_two_read_it(vllm, model)
    dense = {f"self_attn.{name}_proj": "colwise" for name in "qkv"} | {"self_attn.o_proj": "rowwise"}
    dense |= {GATE: "colwise", UP: "colwise", DOWN: "rowwise"}
    changed = {name: dense[name] for name in dense if name not in (GATE, DOWN, "self_attn.q_proj")}
    for pair in (GATE, "self_attn.q_proj"):
        changed |= {f"{pair}.first": "colwise_gather_output", f"{pair}.second": "colwise"}
    changed |= {f"{DOWN}.first": "rowwise", f"{DOWN}.second": "colwise_gather_output"}
    layers = {0: dense, 1: changed}
    prefix = "model.layers"
    assert told == {f"{prefix}.{at}.{name}": style for at, found in layers.items() for name, style in found.items()}


def test_shorter_values_and_groups_of_heads_hand_on_their_own_part(vllm: Any, make_plan: MakePlan) -> None:
    values = {"model.layers.1.self_attn.v_proj": ("head_dim", 8), "model.layers.1.self_attn.o_proj": ("head_dim", 8)}
    model = compressed(
        small_model(small_config("llama")), make_plan, values | {"model.layers.0.self_attn.k_proj": ("latent:1", 8)}
    )
    told = as_two_read_it(vllm, model)
    built = as_vllm_reads(model)
    built.load_state_dict(model.state_dict())
    x = torch.randn(3, 64)
    for name in ("model.layers.1.self_attn.v_proj", "model.layers.0.self_attn.k_proj"):
        whole, part = (one.get_submodule(name)(x) for one in (model, built))
        whole, part = (getattr(one, "features", one) for one in (whole, part))
        assert torch.equal(part, whole[:, whole.shape[1] // 2 :])
        assert not [found for found in told if found.startswith(name)]
    assert told["model.layers.1.self_attn.o_proj"] == "rowwise"


def test_an_mlp_that_cannot_be_divided_is_whole_and_not_merged(vllm: Any, make_plan: MakePlan) -> None:
    narrower = {f"model.layers.1.{name}": ("narrow", 95) for name in (GATE, UP, DOWN)}
    told = as_two_read_it(vllm, compressed(small_model(small_config("llama")), make_plan, narrower))
    assert {name.split(".mlp")[0] for name in told if ".mlp" in name} == {"model.layers.0"}


def test_a_skipped_attention_has_the_heads_of_a_gpu(vllm: Any, make_plan: MakePlan) -> None:
    nothing = {f"model.layers.1.self_attn.{name}_proj": ("skip", 0) for name in "qkvo"}
    model = compressed(small_model(small_config("llama")), make_plan, nothing)
    as_two_read_it(vllm, model)
    attention = as_vllm_reads(model).model.layers[1].self_attn
    assert [getattr(attention, f"{name}_proj").out_features for name in "qkvo"] == [64, 32, 32, 64]


@pytest.mark.parametrize(
    ("family", "changes", "size", "message"),
    [
        (
            "phi3",
            {"model.layers.1.self_attn.o_proj": ("low_rank", 8)},
            2,
            "model.layers.1.self_attn over 2 GPUs (its attention computes with all heads at once); expected an "
            "attention that they divide, as vLLM always does.",
        ),
        (
            "phi3",
            {f"model.layers.1.self_attn.{name}_proj": ("skip", 0) for name in ("qkv", "o")},
            2,
            "model.layers.1.self_attn, which is skipped, over 2 GPUs; expected one with weights of its own for queries",
        ),
        (
            "llama",
            {"model.layers.1.self_attn.q_proj": ("low_rank", 8)},
            4,
            "model.layers.1.self_attn over 4 GPUs, which are more than its 2 key-value heads; expected as many at "
            "most, where weights of the attention are no longer linear.",
        ),
    ],
)
def test_an_attention_that_cannot_be_divided_is_refused(
    family: str, changes: Any, size: int, message: str, vllm: Any, make_plan: MakePlan
) -> None:
    vllm.get_tensor_model_parallel_world_size = lambda: size
    vllm.get_tensor_model_parallel_rank = lambda: 0
    with pytest.raises(ValueError) as caught:
        built_for_vllm(compressed(small_model(small_config(family)), make_plan, changes))
    assert str(caught.value).startswith(message)


def test_gate_above_up_as_a_pair_hands_on_all_neurons(vllm: Any, make_plan: MakePlan) -> None:
    changes = {"model.layers.1.mlp.gate_up_proj": ("low_rank", 16)}
    told = as_two_read_it(vllm, compressed(small_model(small_config("phi3")), make_plan, changes))
    assert {name: style for name, style in told.items() if ".1.mlp" in name} == {
        "model.layers.1.mlp.gate_up_proj.first": "colwise_gather_output",
        "model.layers.1.mlp.gate_up_proj.second": "colwise_gather_output",
        "model.layers.1.mlp.down_proj": "rowwise_split_input",
    }


def test_a_layer_with_fewer_heads_is_refused(vllm: Any, make_plan: MakePlan) -> None:
    fewer = {f"model.layers.1.self_attn.{name}_proj": ("heads", 1) for name in "qkvo"}
    model = compressed(small_model(small_config("llama")), make_plan, fewer)
    with pytest.raises(ValueError, match="has 1 key-value heads; expected 2 in every layer"):
        built_for_vllm(model)


def test_a_skipped_attention_is_built_with_all_heads(vllm: Any, make_plan: MakePlan) -> None:
    nothing = {f"model.layers.1.self_attn.{name}_proj": ("skip", 0) for name in "qkvo"}
    model = compressed(small_model(small_config("llama")), make_plan, nothing)
    assert children(built_for_vllm(model), 1) == {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Other(nn.Module):
    """A server's own layer in the place of a linear one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@every_family
def test_other_layers_can_stand_for_the_linear_ones(model_type: str, make_plan: MakePlan) -> None:
    model = small_compressed(model_type, make_plan)
    expected = logits(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        model.set_submodule(name, Other(linear))
    assert torch.equal(logits(model), expected)


def test_the_model_itself_is_not_annotated() -> None:
    """vLLM compares the type of the config with the first annotation that it finds."""
    parameters = inspect.signature(CompressedModel.__init__).parameters
    assert parameters["self"].annotation is inspect.Parameter.empty


def test_transformers_serve_finds_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SimpleNamespace(transformers=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.model_manager", manager)
    show_to_serve(CompressedModel)
    assert manager.transformers.CompressedModel is CompressedModel


# --- weights of few bits --------------------------------------------------------------------------------------------


def with_stored(make_plan: MakePlan, **chosen: tuple[str, int, str]) -> Any:
    """Weights of the second layer by the last part of their names."""
    model = small_model(small_config("llama"))
    block = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}
    names = {name: f"model.layers.1.{block.get(name, 'mlp')}.{name}_proj" for name in chosen}
    return stored(model, make_plan, {names[name]: one for name, one in chosen.items()})


def as_vllm_reads(model: Any) -> Any:
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = "vllm"
    return type(model)(config).eval()


def test_what_is_stored_is_left_to_vllm_as_linear_weights(vllm: Any, make_plan: MakePlan) -> None:
    model = with_stored(make_plan, gate=("dense", 64, "w8a8"), up=("dense", 64, "w8a8"), q=("low_rank", 16, "fp8"))
    built = as_vllm_reads(model)
    mlp, q = (built.get_submodule(f"model.layers.1.{name}") for name in ("mlp", "self_attn.q_proj"))
    assert {type(one) for one in (mlp.gate_proj, mlp.up_proj, q.first, q.second)} == {nn.Linear}
    assert type(mlp) is type(built.get_submodule("model.layers.0.mlp"))  # both are stored alike, and can be merged


def test_weights_that_are_stored_in_several_ways_are_not_merged(vllm: Any, make_plan: MakePlan) -> None:
    built = as_vllm_reads(with_stored(make_plan, gate=("dense", 64, "w8a8"), up=("dense", 64, "w4a16:16")))
    mixed, plain = (built.get_submodule(f"model.layers.{layer}.mlp") for layer in (1, 0))
    assert isinstance(mixed, type(plain))
    assert inspect.signature(mixed.forward) == inspect.signature(plain.forward)
    mixed.load_state_dict(plain.state_dict())
    x = torch.randn(2, 64)
    assert torch.equal(mixed(x), plain(x))
    assert any(node.target == "gate_proj" for node in LeafTracer().trace(plain).nodes)
    with pytest.raises(TypeError, match="weights that are stored or divided in several ways are not merged"):
        LeafTracer().trace(mixed)


class LeafTracer(fx.Tracer):
    """Submodules stay as they are, as where vLLM looks for what to merge."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"v": ("head_dim", 16, "w4a16:16"), "o": ("head_dim", 16, "bf16")},
            "v_proj is a ValueLinear in w4a16:16; expected a linear weight that quant",
        ),
        ({"v": ("latent:1", 8, "w8a16")}, "v_proj.second is a BlockLinear in w8a16; expected a linear weight that"),
        ({"up": ("dense", 64, "w4a16:48")}, "up_proj is a Linear in w4a16:48; expected a linear weight that quant"),
    ],
)
def test_what_vllm_cannot_read_is_named(chosen: Any, message: str, vllm: Any, make_plan: MakePlan) -> None:
    with pytest.raises(ValueError, match=message):
        as_vllm_reads(with_stored(make_plan, **chosen))
