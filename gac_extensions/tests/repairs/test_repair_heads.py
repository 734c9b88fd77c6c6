"""Attentions with fewer heads, as LLM-Pruner leaves them: written as they are, in a checkpoint that GAC opens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import gac
from gac.checkpoint.card import model_card
from gac.core.errors import PlanError
from gac.models.families import family_of
from gac.plan.plan import Plan
from gac.testing.models import tiny_config
from gac_extensions.repairs.report import RepairResult, UnpaddedDim, repair_tables
from gac_extensions.report.sources import Sources
from gac_extensions.tests.repairs import checkpoints
from gac_extensions.tests.repairs.checkpoints import (
    H100,
    IDS,
    Tensors,
    logits,
    narrowed,
    read,
    refused,
    relative,
    size,
    write,
)
from tests.models.small import small_config, small_model

ATTENTION = "model.layers.{}.self_attn"
SITE = f"{ATTENTION}.q_proj+k_proj+v_proj+o_proj"
KEPT = {"multi-head": {0: [0, 1, 3], 1: [2]}, "grouped": {1: [1]}}


def pruned(attention: str) -> tuple[LlamaForCausalLM, Tensors]:
    """A dense model with 4 query heads of 16, and the tensors of the pruned one: other heads in each layer."""
    torch.manual_seed(0)
    config = tiny_config()
    config.num_key_value_heads = 4 if attention == "multi-head" else 2
    model = LlamaForCausalLM(config).eval()
    return model, checkpoints.with_heads(model, KEPT[attention], narrowed(model, [107, 176]))


@pytest.fixture
def repaired(tmp_path: Path) -> Callable[..., RepairResult]:
    def repair(attention: str, **options: Any) -> RepairResult:
        model, tensors = pruned(attention)
        source = write(tmp_path / "theirs", model.config, tensors)
        return gac.repair(source, tmp_path / "ours", profile=H100, **options)

    return repair


def computed(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


@pytest.mark.parametrize("attention", KEPT)
def test_outputs_equal_those_of_the_pruned_model(attention: str, tmp_path: Path, repaired) -> None:
    repaired(attention)
    model: Any = pruned(attention)[0]
    ours: Any = gac.load(tmp_path / "ours", "cpu", verify=True)
    theirs = logits(tmp_path / "theirs", model.config)  # with plain nn.Linear of the pruned sizes
    assert relative(computed(ours), theirs) < 1e-5
    assert relative(computed(model), theirs) > 1e-2
    assert relative(computed(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")), theirs) < 1e-5
    groups = model.config.num_key_value_heads
    with torch.no_grad():  # the dense model without these heads and neurons
        for layer, heads in KEPT[attention].items():
            columns = model.model.layers[layer].self_attn.o_proj.weight.view(64, groups, -1)
            columns[:, [head for head in range(groups) if head not in heads]] = 0
        model.model.layers[0].mlp.down_proj.weight[:, 107:] = 0
    assert relative(computed(ours), computed(model)) < 1e-5
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(ours.generate(IDS, **options), ours.generate(IDS, use_cache=False, **options))


@pytest.mark.parametrize("model_type", ["qwen2", "gemma2", "cohere"])
def test_other_architectures(model_type: str, tmp_path: Path) -> None:
    """With biases, with norms behind o_proj, with tied embeddings."""
    model: Any = small_model(small_config(model_type))
    write(tmp_path / "theirs", model.config, checkpoints.with_heads(model, {0: [1]}, dict(model.state_dict())))
    gac.repair(tmp_path / "theirs", tmp_path / "ours", profile=H100)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.view(64, 2, -1)[:, 0] = 0
    assert relative(computed(gac.load(tmp_path / "ours", "cpu")), computed(model)) < 1e-5


def test_pickled_weights_with_old_buffers(tmp_path: Path) -> None:
    model, tensors = pruned("grouped")
    old = {f"{ATTENTION.format(layer)}.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
    source = write(tmp_path / "theirs", model.config, tensors | old, pickled=True)
    gac.repair(source, tmp_path / "ours", profile=H100, allow_pickle=True)
    theirs = logits(write(tmp_path / "safe", model.config, tensors), model.config)
    assert relative(computed(gac.load(tmp_path / "ours", "cpu")), theirs) < 1e-5


def test_heads_are_unpadded_and_widths_padded(tmp_path: Path, repaired) -> None:
    result = repaired("multi-head")
    assert result.layouts == ("MLP widths", "fewer heads")
    assert result.carried == (UnpaddedDim(SITE.format(0), "heads", 3), UnpaddedDim(SITE.format(1), "heads", 1))
    assert [(dim.name, dim.dim, dim.becomes) for dim in result.moved] == [("model.layers.0.mlp", 107, 112)]
    assert (result.dims, result.kept) == (2, ())
    ours, theirs = read(tmp_path / "ours"), read(tmp_path / "theirs")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items() if "layers.0.mlp" not in name)
    assert (result.bytes_before, result.bytes_after) == (size(theirs), size(ours))
    lines = [line for table in repair_tables(result) for line in str(table).splitlines()]
    assert "carried   heads as they were: 1 x h 1, 1 x h 3; there is nothing to pad" in lines


def test_plan_states_forms_without_predictions(tmp_path: Path, repaired) -> None:
    repaired("grouped")
    plan = Plan.load(tmp_path / "ours" / "plan.json")
    forms = {choice.name: (choice.form, choice.dim) for choice in plan.weights if choice.form != "dense"}
    block, mlp = ATTENTION.format(1), "model.layers.0.mlp"
    heads = {f"{block}.{name}": ("heads", 1) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    assert forms == heads | {f"{mlp}.{name}": ("narrow", 112) for name in ("gate_proj", "up_proj", "down_proj")}
    assert plan.kv_numbers == (96, 128)
    stored = sum(tensor.numel() for tensor in read(tmp_path / "ours").values())
    assert plan.kept_of_model * plan.measured.params == pytest.approx(stored)
    assert "loss         unknown" in plan.summary()
    assert "perplexity" not in plan.summary()
    card = (tmp_path / "ours" / "README.md").read_text()
    assert card == model_card(plan)
    assert "gac allocate" not in card
    with pytest.raises(PlanError, match="what others pruned"):
        Sources(plan)


def test_mlps_can_be_wider_than_in_the_config(tmp_path: Path) -> None:
    config = small_config("llama")
    config.intermediate_size = 107
    model: Any = small_model(config)
    source = write(tmp_path / "theirs", config, checkpoints.with_heads(model, {0: [1]}, narrowed(model, [107, 93])))
    gac.repair(source, tmp_path / "ours", profile=H100)
    ours = gac.load(tmp_path / "ours", "cpu")
    assert ours.config.intermediate_size == 112
    assert relative(computed(ours), logits(source, config)) < 1e-5
    assert {choice.form for choice in ours.gac_plan.weights if "layers.0.mlp" in choice.name} == {"dense"}


def test_result_can_be_repaired_saved_and_exported(tmp_path: Path, repaired) -> None:
    repaired("multi-head", max_overhead=0.01)
    again = gac.repair(tmp_path / "ours", tmp_path / "again", profile=H100)
    assert [(dim.dim, dim.becomes) for dim in again.moved] == [(107, 112)]
    assert [dim.dim for dim in again.carried] == [3, 1]
    assert again.kept == ()
    ours = gac.load(tmp_path / "again", "cpu")
    theirs = computed(ours)
    assert relative(theirs, logits(tmp_path / "theirs", pruned("multi-head")[0].config)) < 1e-5
    gac.save(ours, tmp_path / "saved")
    assert torch.equal(computed(gac.load(tmp_path / "saved", "cpu")), theirs)
    gac.export(tmp_path / "again", tmp_path / "merged", merge=True)
    assert relative(computed(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), theirs) < 1e-5


def test_widths_alone_keep_the_stock_layout(tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    source = write(tmp_path / "all", tiny_model.config, narrowed(tiny_model, [107, 93]))
    assert gac.repair(source, tmp_path / "stock", profile=H100).carried == ()
    assert not (tmp_path / "stock" / "plan.json").exists()
    assert "gac" not in json.loads((tmp_path / "stock" / "config.json").read_bytes())


Q, K, V, OUT = (f"{ATTENTION.format(0)}.{name}_proj" for name in "qkvo")
SHAPES = "expected 32*h x 64, 16*h x 64, 16*h x 64, 64 x 32*h with one whole h from 1 to 2, the key-value heads"


@pytest.mark.parametrize(
    ("changed", "shapes"),
    [
        ({K: (24, 64)}, "q_proj 64 x 64, k_proj 24 x 64, v_proj 32 x 64, o_proj 64 x 64"),
        ({OUT: (64, 32), V: None}, "q_proj 64 x 64, k_proj 32 x 64, v_proj missing, o_proj 64 x 32"),
        # half a group
        ({Q: (16, 64), K: (16, 64), V: (16, 64), OUT: (64, 16)}, "q_proj 16 x 64, k_proj 16 x 64, v_proj 16 x 64"),
    ],
)
def test_contradicting_shapes(
    changed: dict[str, tuple[int, int] | None], shapes: str, tiny_model: LlamaForCausalLM, tmp_path: Path
) -> None:
    tensors = dict(tiny_model.state_dict())
    for name, shape in changed.items():
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.weight": torch.ones(shape)} if shape else {}
    message = refused(write(tmp_path / "theirs", tiny_model.config, tensors))
    assert f"{ATTENTION.format(0)} has {shapes}" in message
    assert SHAPES in message


@pytest.mark.parametrize("model_type", ["gpt2", "phi3", "olmo2"])
def test_architectures_with_fixed_heads(model_type: str, tmp_path: Path) -> None:
    config = small_config(model_type)
    family = family_of(config)
    tensors = {name: tensor.clone() for name, tensor in small_model(config).state_dict().items()}
    output = f"{family.layers}.1.{family.output}.weight"
    source = write(tmp_path / "theirs", config, tensors | {output: tensors[output][:, :32].clone()})
    assert f"would need the form heads, which fits no weight of a {model_type} model" in refused(source)


def test_unsupported_tensors(tmp_path: Path) -> None:
    model, tensors = pruned("grouped")
    source = tmp_path / "theirs"

    def message(changed: Tensors, without: str = "") -> str:
        stored = {name: tensor for name, tensor in (tensors | changed).items() if name != without}
        for file in source.glob("*"):
            file.unlink()
        if source.exists():
            source.rmdir()
        return refused(write(source, model.config, stored))

    stem = "model.layers.1.mlp.down"
    factors = {f"{stem}_u_proj.weight": torch.ones(64, 13), f"{stem}_v_proj.weight": torch.ones(13, 176)}
    assert "fewer heads beside pairs of SVD-LLM; expected" in message(factors, f"{stem}_proj.weight")
    assert f"{source}: model.norm.weight is missing (1 in all)" in message({}, "model.norm.weight")
    assert "q_proj.bias is unexpected" in message({f"{Q}.bias": torch.ones(64)})
    model = small_model(small_config("qwen2"))
    bias = {f"{K}.bias": model.state_dict()[f"{K}.bias"]}  # of all heads
    tensors = checkpoints.with_heads(model, {0: [1]}, dict(model.state_dict()))
    assert f"{K}.bias is of shape " in message(bias)
