"""Mixtures of experts: attention, dense layers and shared experts are compressed; what routes stays bit for bit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING

import gac
from gac.core.errors import BudgetError, PlanError
from gac.forms import form_named
from gac.models.families import family_of
from gac.models.loading import load_model
from gac.models.rotation import rotate
from gac.runtime.contract import COMPRESSED
from gac.runtime.parallel.division import cuts_of
from gac.runtime.parallel.ranks import SplitError
from gac.runtime.vllm.check import refusal
from tests.compression.applying import IDS, logits, with_dims
from tests.compression.compressed import MakePlan
from tests.models.small import MIXTURES, linear_weights, small_config, small_model, weights_of
from tests.refused import assert_refused
from tests.small_pipeline import Small, has_state, state_of
from tests.without_gac import WithoutGac

FEW = ("granitemoeshared", "gpt_oss", "qwen2_moe")
"""A factor and a shared expert beside the block; biases, sinks and transposed experts; a shared expert with a gate."""
WITH_STATES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 8,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 80,
    },
}
"""Those whose small configs have no experts, and what they have with them."""
mixtures = pytest.mark.parametrize(
    "model_type",
    [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in (*MIXTURES, *WITH_STATES) if name not in FEW)],
)


def config_of(model_type: str, **changed: Any) -> Any:
    """The small config, with experts."""
    if model_type not in WITH_STATES:
        return small_config(model_type, **changed)
    without = small_config(model_type).to_dict()
    return CONFIG_MAPPING[model_type](**without | WITH_STATES[model_type])


def deep(model_type: str) -> Any:
    """Four layers where there can be as many, so that some can be skipped."""
    return small_model(config_of(model_type, num_hidden_layers=4))


def in_layers(model: Any) -> dict[str, tuple[str, nn.Module]]:
    """Every module of the decoder layers by its name, with the name in its layer."""
    layers = re.escape(family_of(model.config).layers)
    matches = ((name, re.match(rf"{layers}\.\d+\.(.+)", name), module) for name, module in model.named_modules())
    return {name: (match[1], module) for name, match, module in matches if match}


@mixtures
def test_the_sites_are_the_linear_layers_outside_of_experts_and_routers(model_type: str) -> None:
    config = config_of(model_type)
    sizes = {weight.name: (weight.out_features, weight.in_features) for weight in weights_of(config)}
    assert sizes == linear_weights(small_model(config))


@mixtures
def test_parameters_of_routed_experts_follow_from_the_config(model_type: str) -> None:
    config = config_of(model_type)
    model, family = small_model(config), family_of(config)
    stacks = [module for path, module in in_layers(model).values() if path == family.experts.stack]
    counted = family.routed_params(config)
    assert counted.params == sum(values.numel() for stack in stacks for values in stack.parameters())
    assert counted.active * 8 == counted.params * 2
    assert len(family.routing_blocks(config)) == len(stacks)
    assert all(model.get_submodule(name) is not None for name in family.routing_blocks(config).values())


@mixtures
def test_the_pipeline_leaves_experts_and_routers_alone(
    model_type: str, small: Small, without_gac: WithoutGac, tmp_path: Path
) -> None:
    dense = deep(model_type)
    before = {name: values.clone() for name, values in dense.state_dict().items()}
    fitting = {
        "narrow": [w.neurons for w in weights_of(dense.config)],
        "skip": [w.block for w in weights_of(dense.config)],
    }
    forms = ("low_rank", *(form for form, sides in fitting.items() if any(sides)))
    plan = small.allocate(0.6, model=dense, forms=forms, workloads=())
    model: Any = small.compress(plan, model=dense)
    gac.save(model, tmp_path / "saved")
    loaded: Any = gac.load(tmp_path / "saved", verify=True)
    assert has_state(loaded, state_of(model))
    torch.testing.assert_close(logits(loaded), logits(model))  # grouped GEMMs round by where tensors lie in memory
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(IDS, **options), loaded.generate(IDS, use_cache=False, **options))

    targeted = tuple(f"{weight.name}." for weight in weights_of(dense.config))
    refitted = f"{family_of(dense.config).last_norm}."  # which makes up for all layers
    left = {name for name in before if not name.startswith((*targeted, refitted))}
    stack = family_of(dense.config).experts.stack
    assert any(f".{stack}." in name for name in left)
    read = loaded.state_dict()
    assert all(torch.equal(read[name], before[name]) for name in left)

    without_gac.check(tmp_path / "saved", model)


@mixtures
def test_a_published_checkpoint_keeps_its_experts_and_the_dtypes_of_routers(
    model_type: str, small: Small, tmp_path: Path
) -> None:
    """In bfloat16, in files as they are published: experts one by one, in most; routers stay in float32, in many."""
    config = config_of(model_type)
    config.dtype = torch.bfloat16
    small_model(config).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    small.tokenizer.save_pretrained(tmp_path / "dense")
    plan = gac.allocate(
        tmp_path / "dense", 0.8, **small.options | {"calibration": f"{small.text}:2x32", "workloads": ()}
    )
    model: Any = gac.compress(tmp_path / "dense", plan, progress=False)
    gac.save(model, tmp_path / "saved", tokenizer=small.tokenizer)
    loaded = gac.load(tmp_path / "saved", verify=True)
    assert has_state(loaded, state_of(model))
    torch.testing.assert_close(logits(loaded), logits(model))
    experts, before = family_of(config).experts, load_model(tmp_path / "dense", device="cpu").model.state_dict()
    state, parts = loaded.state_dict(), (f".{experts.stack}.", f".{experts.router}.")
    routed = [name for name in state if any(part in name for part in parts)]
    assert len(routed) >= 3
    assert all(torch.equal(state[name], before[name]) and state[name].dtype == before[name].dtype for name in routed)


def test_the_summary_says_that_experts_stay(small: Small, tmp_path: Path) -> None:
    model = deep("qwen2_moe")
    plan = small.allocate(0.7, model=model)
    assert plan.measured.experts == family_of(model.config).routed_params(model.config)
    experts = f"{plan.measured.experts.params / 1000:.0f}K parameters, 60 % of the model, stay as they are;"
    assert f"experts      routed experts: {experts}\n{'':13}55.3K of them are active for a token" in plan.summary()
    plan.save(tmp_path / "plan.json")
    assert gac.Plan.load(tmp_path / "plan.json") == plan
    assert "experts  " not in small.allocate(0.7).summary()


def test_a_size_that_the_experts_take_alone_is_refused(small: Small) -> None:
    model = deep("mixtral")
    with pytest.raises(BudgetError, match="which embeddings, head, norms and biases take, with the routed experts"):
        small.allocate("0.1M", model=model)


def test_default_forms_are_those_that_fit(small: Small) -> None:
    """Nothing of Mixtral can be narrowed."""
    model = deep("mixtral")
    assert small.allocate(0.7, model=model).recipe.space.forms == ("low_rank",)
    assert_refused(
        lambda: small.allocate(0.7, model=model, forms=("narrow",)),
        "form narrow, which fits no weight of a mixtral model",
        error=PlanError,
    )


@pytest.mark.parametrize("model_type", ["qwen2_moe", "glm4_moe"])
def test_healing_trains_what_the_plan_changes(model_type: str, small: Small) -> None:
    dense = deep(model_type)
    model = small.compress(small.allocate(0.6, model=dense, workloads=()), model=deep(model_type))
    before = state_of(model)
    healed = gac.heal(model, against=dense, tokens=4096, tokenizer=small.tokenizer, progress=False)
    changed = tuple(f"{weight.name}." for weight in model.gac_plan.weights if weight.changed)
    moved = {name for name, values in healed.state_dict().items() if not torch.equal(values, before[name])}
    assert moved
    assert all(name.startswith(changed) or "norm" in name for name in moved)


@pytest.mark.parametrize("form", ["low_rank", "narrow", "head_dim", "heads", "skip", "latent"])
def test_every_form_fits_attention_or_shared_experts(
    form: str, small: Small, make_plan: MakePlan, tmp_path: Path
) -> None:
    model = deep("glm4_moe")
    takes = [w for w in weights_of(model.config) if ".2." in w.name and form_named(form).applies_to(w)]
    assert takes
    names = {w.name for w in takes} & {w.name for w in takes if ".shared_experts." in w.name} or {w.name for w in takes}
    dims = {"low_rank": 8, "narrow": 40, "head_dim": 16, "heads": 1, "skip": 0, "latent": 16}
    saved = with_dims(model, lambda _weights: dict.fromkeys(names, (form, dims[form])), make_plan)
    gac.save(saved, tmp_path / "saved", tokenizer=small.tokenizer)
    loaded = gac.load(tmp_path / "saved", verify=True)
    assert has_state(loaded, state_of(saved))
    torch.testing.assert_close(logits(loaded), logits(saved))


def test_attention_and_shared_experts_in_few_bits(small: Small, tmp_path: Path) -> None:
    dense = deep("glm4_moe")
    plan = small.allocate(0.9, model=dense, memory=0.25, schemes=("bf16", "w4a16:32", "fp8"), workloads=())
    model = small.compress(plan, model=dense)
    gac.save(model, tmp_path / "saved", tokenizer=small.tokenizer)
    loaded = gac.load(tmp_path / "saved", verify=True)
    assert has_state(loaded, state_of(model))
    torch.testing.assert_close(logits(loaded), logits(model))
    assert {choice.scheme for choice in plan.weights if "experts" in choice.name} & {"w4a16:32", "fp8"}


def test_what_cannot_be_had_is_refused_by_name(small: Small) -> None:
    model = small_model(small_config("qwen3_moe"))
    assert_refused(lambda: rotate(model), "a Qwen3MoeForCausalLM, a mixture of experts, rotated", "Leave rotate out.")
    assert_refused(
        lambda: small.allocate(0.7, model=model, tensor_parallel=2),
        "tensor_parallel=2 for a qwen3_moe, a mixture of experts",
        "Plan for one GPU",
    )
    with pytest.raises(SplitError, match="a qwen3_moe, a mixture of experts, over 2 processes"):
        cuts_of(model, 0, 2)
    config = small_config("minimax_m2")
    config.model_type = COMPRESSED + config.model_type
    value, _, remedy = refusal(config) or ("", "", "")
    assert value == "model type 'minimax_m2', a mixture of experts"
    assert remedy.startswith("Run this checkpoint in transformers")


@pytest.mark.parametrize(
    ("model_type", "changed", "message"),
    [
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            "a config with num_experts_per_tok 9; expected 1 to 8, which is num_loc",
        ),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 0},
            "a config with moe_intermediate_size 0; expected 1 to 2,147,483,648.",
        ),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "a config with decoder_sparse_step 0; expected 1 or more."),
        (
            "glm4_moe",
            {"n_group": 3},
            "a config with 8 experts in n_group 3, of which topk_group 1 are chosen; expected gr",
        ),
        ("glm4_moe", {"n_group": 8, "topk_group": 1}, "a config with 8 experts in n_group 8, of which topk_group 1"),
        (
            "mellum",
            {"mlp_layer_types": ["sparse"]},
            "a config with mlp_layer_types of 1 entries (sparse); expected 2, one",
        ),
        ("mellum", {"mlp_layer_types": ["sparse", "x"]}, "a config with mlp_layer_types of 2 entries (sparse, x)"),
    ],
)
def test_experts_that_no_model_can_have_are_refused(model_type: str, changed: dict[str, Any], message: str) -> None:
    config = small_config(model_type)
    vars(config).update({config.attribute_map.get(name, name): value for name, value in changed.items()})
    assert_refused(lambda: family_of(config).sites(config), message)


_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def test_experts_in_mxfp4_are_dequantised_as_they_are_read(tmp_path: Path) -> None:
    config = small_config("gpt_oss")
    config.intermediate_size = 64  # blocks are of 32 columns
    small_model(config).to(torch.bfloat16).save_pretrained(tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = torch.stack([_FP4[(blocks & 15).long()], _FP4[(blocks >> 4).long()]], -1).reshape(*shape, 32)
        values = values * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = values.reshape(experts, rows, columns).transpose(1, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    loaded = load_model(tmp_path, device="cpu", dequantise=True)
    assert not loaded.on_grid
    assert len(expected) == 4
    read = loaded.model.state_dict()
    assert all(torch.equal(read[name].float(), values) for name, values in expected.items())
