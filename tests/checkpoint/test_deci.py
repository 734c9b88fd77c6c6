"""Compressed models as DeciLM: their tensors and configs, the function that these say, and what is refused."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import gac
from gac.core.errors import CheckpointError
from gac.forms import form_named
from gac.plan.plan import Plan
from tests.checkpoint.exported import uniform, words
from tests.compression.applying import logits
from tests.compression.compressed import compressed
from tests.compression.ends import with_rounded_ends
from tests.models.small import small_config, small_model, weights_of

MakePlan = Callable[..., Plan]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
}
HEADS, GROUPS, LENGTH = 8, 4, 32
SIZES = {"hidden_size": 256, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": LENGTH}
WIDTHS = {0: 128, 1: 97, 4: 48}
KEPT_GROUPS = {1: 1, 4: 3}
SKIPPED = (("attention", 2), ("mlp", 2), ("attention", 3), ("mlp", 5))


def changes(config: Any) -> dict[str, tuple[str, int]]:
    """Three widths, two numbers of heads, and skipped blocks: one alone, and three in a row."""
    chosen = {}
    for weight in weights_of(config):
        layer, block = int(weight.name.split(".")[2]), "mlp" if weight.neurons else "attention"
        if (block, layer) in SKIPPED:
            chosen[weight.name] = ("skip", 0)
        elif block == "mlp" and layer in WIDTHS:
            chosen[weight.name] = ("narrow", WIDTHS[layer])
        elif block == "attention" and layer in KEPT_GROUPS:
            chosen[weight.name] = ("heads", KEPT_GROUPS[layer])
    return chosen


def varied(model_type: str, make_plan: MakePlan, **changed: Any) -> Any:
    """A small compressed model whose six layers differ."""
    config = small_config(model_type, num_hidden_layers=6, **SIZES, **KINDS[model_type], **changed)
    return compressed(small_model(config), make_plan, changes(config)).float()


def exported(model: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    gac.export(model, folder, deci=True)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def read(document: Mapping[str, Any], state: dict[str, Tensor]) -> Any:
    """The model that a DeciLM's config and tensors describe, as a Llama with zeros in the place of skipped blocks."""
    known = vars(LlamaConfig()).keys() & document.keys() - {"model_type", "architectures"}
    model = LlamaForCausalLM(LlamaConfig(**{name: document[name] for name in known}))
    for layer, block in zip(model.model.layers, document["block_configs"], strict=True):
        layer.self_attn.num_key_value_groups = block["attention"]["n_heads_in_group"] or HEADS // GROUPS
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = state.pop(f"{name}.weight", torch.zeros_like(module.weight))
            bias = state.pop(f"{name}.bias", torch.zeros(len(weight)))
            module.weight, module.bias = nn.Parameter(weight), nn.Parameter(bias)
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    model.tie_weights()
    return model.eval()


# --- the same model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", KINDS)
def test_it_is_the_same_function(model_type: str, make_plan: MakePlan, tmp_path: Path) -> None:
    model = varied(model_type, make_plan)
    again = read(*exported(model, tmp_path / "deci"))
    assert (logits(again) - logits(model)).abs().max() < 1e-5 * logits(model).abs().max()


def test_the_config_has_the_sizes_of_every_layer(make_plan: MakePlan, tmp_path: Path) -> None:
    config, _ = exported(varied("mistral", make_plan), tmp_path / "deci")
    attention: dict[str, Any] = {"no_op": False, "replace_with_linear": False, "n_heads_in_group": 2}
    no_attention = attention | {"no_op": True, "n_heads_in_group": None}
    one_group = attention | {"n_heads_in_group": 8}
    mlp: dict[str, Any] = {"no_op": False, "replace_with_linear": False, "intermediate_size": 176}
    no_mlp = mlp | {"no_op": True, "intermediate_size": None, "ffn_mult": None}
    assert config["block_configs"] == [
        {"attention": attention, "ffn": mlp | {"intermediate_size": 128}},
        {"attention": one_group, "ffn": mlp | {"intermediate_size": 97}},
        {"attention": no_attention, "ffn": no_mlp},
        {"attention": no_attention, "ffn": mlp},
        {"attention": attention, "ffn": mlp | {"intermediate_size": 48}},
        {"attention": attention, "ffn": no_mlp},
    ]
    assert (config["architectures"], config["model_type"]) == (["DeciLMForCausalLM"], "nemotron-nas")
    assert "auto_map" not in config
    assert (config["num_attention_heads"], config["head_dim"], config["dtype"]) == (HEADS, LENGTH, "float32")
    assert (config["attention_bias"], config["mlp_bias"]) == (True, True)
    assert "gac" not in config


def test_weights_keep_their_numbers_and_zeros_fill_the_heads(make_plan: MakePlan, tmp_path: Path) -> None:
    model = varied("llama", make_plan)
    ours, (_, state) = model.state_dict(), exported(model, tmp_path / "deci")
    unchanged = [name for name in state if "proj" not in name or (".mlp." in name and "bias" not in name)]
    assert len(unchanged) > 20
    assert all(torch.equal(state[name], ours[name]) for name in unchanged)
    o_proj = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(state[o_proj], torch.cat([ours[o_proj], torch.zeros(256, 6 * LENGTH)], 1))
    q_proj, k_proj = (f"model.layers.4.self_attn.{name}_proj.weight" for name in "qk")
    assert torch.equal(state[q_proj], torch.cat([ours[q_proj], torch.zeros(2 * LENGTH, 256)]))
    assert torch.equal(state[k_proj], torch.cat([ours[k_proj], torch.zeros(LENGTH, 256)]))
    assert state["model.layers.1.self_attn.k_proj.weight"].shape == (LENGTH, 256)
    skipped = ("layers.2.", "layers.3.self_attn", "layers.3.input_layernorm", "layers.5.mlp", "layers.5.post_attention")
    assert not [name for name in state if any(part in name for part in skipped)]


def test_constants_go_into_the_bias_before_them(make_plan: MakePlan, tmp_path: Path) -> None:
    model = varied("llama", make_plan)
    ours, (_, state) = model.state_dict(), exported(model, tmp_path / "deci")
    constants = [ours[f"model.layers.{name}.bias"] for name in ("2.self_attn.o_proj", "2.mlp.down_proj")]
    biases = {name: value for name, value in state.items() if name.endswith("bias") and value.any()}
    assert biases.keys() == {"model.layers.1.mlp.down_proj.bias", "model.layers.5.self_attn.o_proj.bias"}
    due = sum(constants, torch.zeros(())) + ours["model.layers.3.self_attn.o_proj.bias"]
    assert torch.equal(biases["model.layers.1.mlp.down_proj.bias"], due)
    assert torch.equal(biases["model.layers.5.self_attn.o_proj.bias"], ours["model.layers.5.mlp.down_proj.bias"])


def test_a_plan_without_skipped_blocks_needs_no_biases(make_plan: MakePlan, tmp_path: Path) -> None:
    config = small_config("llama")
    chosen = {weight.name: ("narrow", 96) for weight in weights_of(config) if weight.neurons and ".1." in weight.name}
    document, state = exported(compressed(small_model(config), make_plan, chosen), tmp_path / "deci")
    assert not document["attention_bias"]
    assert not document["mlp_bias"]
    assert not [name for name in state if name.endswith("bias")]


def test_readers_of_a_factor_find_widths_that_are_multiples_of_256() -> None:
    from gac_extensions.deci import LayerSizes, block_config

    for hidden in (64, 576, 768, 2048, 3072, 4096, 8192, 1000):
        for neurons in range(1, 30000, 85):
            ffn = block_config(LayerSizes(1, neurons), 8, hidden)["ffn"]
            assert ("ffn_mult" in ffn) == (neurons % 256 == 0)
            if "ffn_mult" in ffn:
                width = int(2 * ffn["ffn_mult"] * hidden / 3)
                assert -(-width // 256) * 256 == neurons == ffn["intermediate_size"]


def test_the_directory_holds_no_code(make_plan: MakePlan, tiny_tokenizer: Any, tmp_path: Path) -> None:
    gac.export(varied("llama", make_plan), tmp_path / "deci", deci=True, tokenizer=tiny_tokenizer)
    names = {path.name for path in (tmp_path / "deci").iterdir()}
    usual = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert names == usual | {"tokenizer.json", "tokenizer_config.json"}
    assert "`block_configs`" in (tmp_path / "deci" / "README.md").read_text()
    with pytest.raises(ValueError, match="nemotron-nas"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "deci")


# --- refused --------------------------------------------------------------------------------------------------------


def changed_layer(model_type: str, form: str, dim: int, make_plan: MakePlan, **changed: Any) -> Any:
    """A model with this form in its last layer, wherever it can be."""
    config = small_config(model_type, **changed)
    able = [weight for weight in weights_of(config) if ".1." in weight.name and form_named(form).applies_to(weight)]
    return compressed(small_model(config), make_plan, {weight.name: (form, dim) for weight in able})


def config_alone(model_type: str, make_plan: MakePlan, **changed: Any) -> Any:
    return compressed(small_model(small_config(model_type, **changed)), make_plan, {})


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            partial(changed_layer, "llama", "low_rank", 16),
            "model.layers.1.self_attn.q_proj is low_rank with dim 16, Low",
        ),
        (
            partial(changed_layer, "llama", "head_dim", 8),
            "model.layers.1.self_attn.v_proj is head_dim with dim 8, Value",
        ),
        (
            partial(changed_layer, "llama", "latent:1", 8),
            "model.layers.1.self_attn.k_proj is latent:1 with dim 8, Latent",
        ),
        (partial(uniform, "llama", schemes=("bf16", "w8a16")), "model.layers.0.self_attn.k_proj is dense with dim "),
        (partial(config_alone, "qwen3"), "a model of the architecture qwen3; expected llama or mistral or qwen2. "),
        (partial(config_alone, "gemma2"), "a model of the architecture gemma2; "),
        (
            partial(config_alone, "mistral", sliding_window=64),
            "a mistral config with sliding_window 64; expected None, ",
        ),
        (partial(config_alone, "llama", hidden_act="gelu"), "a llama config with hidden_act 'gelu'; expected 'silu', "),
        (partial(config_alone, "llama", rope_parameters=LINEAR), "a llama config with rope_type 'linear'; expected "),
    ],
)
def test_what_it_cannot_express_is_named(
    make: Callable[..., Any], message: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    model = make(make_plan=make_plan)
    for write in (gac.export, partial(gac.export_gguf, tokenizer=words())):
        with pytest.raises(CheckpointError) as refused:
            write(model, tmp_path / "deci", deci=True)
        assert str(refused.value).startswith(message)
        assert message.startswith("a ") or "gac allocate MODEL --form narrow --form skip" in str(refused.value)
        assert not list(tmp_path.iterdir())


def test_a_quantised_head_is_named(make_plan: MakePlan, tmp_path: Path) -> None:
    model = with_rounded_ends(small_model(small_config("llama")), make_plan)
    with pytest.raises(CheckpointError, match=r"embedding and head in w8a16; expected .* as in DeciLM"):
        gac.export(model, tmp_path / "deci", deci=True)


def test_one_way_at_a_time(make_plan: MakePlan, tmp_path: Path) -> None:
    model = varied("llama", make_plan)
    with pytest.raises(CheckpointError, match=r"^merge and deci; expected one of them"):
        gac.export(model, tmp_path / "deci", deci=True, merge=True)
    with pytest.raises(CheckpointError, match=r"^merge and deci; expected one of them"):
        gac.export_gguf(model, tmp_path / "deci", deci=True, merge=True)
    assert not list(tmp_path.iterdir())
