"""From a plan to a smaller model: nothing lost at full dims, nothing touched on failure."""

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gac.compression.apply import changed_sites
from gac.core.errors import PlanError
from gac.models.families import family_of
from gac.plan.plan import Plan
from tests.changed import with_recipe
from tests.compression.applying import IDS, applied, logits
from tests.models.small import NEURONS, small_config, small_model

MakePlan = Callable[..., Plan]


@pytest.mark.parametrize("refit", ["none", "residual"])
def test_a_dense_plan_changes_nothing(refit: str, tiny_model: LlamaForCausalLM, make_plan: MakePlan) -> None:
    dense, plan = logits(tiny_model), with_recipe(make_plan(tiny_model.config, {}), refit=refit)
    assert torch.equal(logits(applied(tiny_model, plan)), dense)


def test_the_dims_are_those_of_the_plan(
    tiny_model: LlamaForCausalLM, tiny_config: LlamaConfig, make_plan: MakePlan
) -> None:
    mlp = "model.layers.0.mlp"
    changes = {f"{mlp}.{name}": ("narrow", 48) for name in ("gate_proj", "up_proj", "down_proj")}
    model = applied(tiny_model, make_plan(tiny_config, changes | {"model.layers.1.self_attn.q_proj": ("low_rank", 8)}))
    narrow = model.model.layers[0].mlp
    assert narrow.gate_proj.weight.shape == (48, 64)
    assert narrow.up_proj.weight.shape == (48, 64)
    assert narrow.down_proj.weight.shape == (64, 48)
    assert model.model.layers[1].self_attn.q_proj.rank == 8
    assert type(model) is LlamaForCausalLM
    assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape == (2, 24)


def test_biases_follow_their_outputs(tiny_config: LlamaConfig, make_plan: MakePlan) -> None:
    config = copy.deepcopy(tiny_config)
    config.mlp_bias = config.attention_bias = True
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    dense = logits(model)
    mlp = "model.layers.0.mlp"
    changes = {f"{mlp}.{name}": ("narrow", 176) for name in ("gate_proj", "up_proj", "down_proj")}
    changes |= {"model.layers.0.self_attn.o_proj": ("low_rank", 64)}
    assert (logits(applied(model, make_plan(config, changes))) - dense).abs().max() < 1e-4


def test_gate_and_up_in_one_weight_keep_the_same_neurons(make_plan: MakePlan) -> None:
    config, name = small_config("phi3"), "model.layers.0.mlp"
    dense = small_model(config).get_submodule(f"{name}.gate_up_proj").weight.tolist()
    changes = {f"{name}.gate_up_proj": ("narrow", 40), f"{name}.down_proj": ("narrow", 40)}
    small = applied(small_model(config), make_plan(config, changes))
    kept = [dense.index(row) for row in small.get_submodule(f"{name}.gate_up_proj").weight.tolist()]
    assert kept[40:] == [NEURONS + neuron for neuron in kept[:40]]
    assert max(kept[:40]) < NEURONS


def test_a_plan_for_another_model_is_refused(tiny_config: LlamaConfig, make_plan: MakePlan) -> None:
    plan = make_plan(tiny_config, {})
    other = copy.deepcopy(tiny_config)
    other.intermediate_size = 128
    with pytest.raises(PlanError, match=r"gate_proj', 176, 64\) stands; expected .*gate_proj', 128, 64\)"):
        changed_sites(plan, family_of(other).sites(other))
