"""From a plan to a smaller model; pairs for each group of heads, and shorter value vectors in every family."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import gac
from gac.compression.apply import changed_sites
from gac.core.errors import PlanError
from gac.forms import form_named
from gac.forms.latent import Latent
from gac.models.families import family_of, supported
from gac.models.sites import Weight
from tests.changed import with_recipe
from tests.compression.applying import applied, generates_the_same, logits
from tests.compression.compressed import MakePlan, share_inputs
from tests.models.small import NEURONS, VALUE_LAYOUTS, has_value_weights, small_config, small_model, weights_of

SHORT, GROUPS, HEAD_DIM = 8, 2, 16
K = Weight("k", 128, 96, heads=8, cached=True)
METHODS = {"head_dim": "kfac", "latent:1": "palu:1"}


def changes(config: Any, form: str, dim: int) -> dict[str, tuple[str, int]]:
    """Every weight that can have the form has it."""
    return {weight.name: (form, dim) for weight in weights_of(config) if form_named(form).applies_to(weight)}


# --- what groups of heads count -------------------------------------------------------------------------------------


def test_heads_are_grouped_evenly() -> None:
    assert Latent(4).groups(Weight("k", 192, 576, heads=3, cached=True)) == 1
    with pytest.raises(PlanError, match="groups of 4 of the 6 heads of k; expected groups of 1, 2, 3, 6 heads"):
        Latent(4).groups(Weight("k", 96, 64, heads=6, cached=True))


def test_only_keys_and_values_take_it() -> None:
    taking = [name.rpartition(".")[2] for name in changes(small_config("llama"), "latent:2", 1)]
    assert taking == ["k_proj", "v_proj"] * 2


# --- every architecture with values of their own --------------------------------------------------------------------


def dense_model(config: Any, span: int = HEAD_DIM) -> PreTrainedModel:
    """A random model; its value vectors lie in as many directions as ``span`` says."""
    model = small_model(config)
    for weight in weights_of(config):
        if weight.values == "out":
            v_proj: Any = model.get_submodule(weight.name)
            groups, features = weight.heads, weight.in_features
            rows = torch.randn(groups, HEAD_DIM, span) @ torch.randn(groups, span, features) / span
            with torch.no_grad():
                v_proj.weight.copy_(rows.flatten(0, 1))
                if v_proj.bias is not None:
                    v_proj.bias.copy_(v_proj.weight @ torch.randn(features))
    return model


def test_most_architectures_have_values_of_their_own() -> None:
    assert set(supported()) - set(filter(has_value_weights, supported())) == {"gpt2", "gpt_neox", "phi3"}


@pytest.mark.parametrize("model_type", VALUE_LAYOUTS)
def test_nothing_is_lost_where_values_lie_in_few_directions(model_type: str, make_plan: MakePlan) -> None:
    config = small_config(model_type, head_dim=HEAD_DIM)
    model = dense_model(config, span=SHORT)
    before = logits(model)
    small: Any = applied(model, make_plan(config, changes(config, "head_dim", SHORT)), "svd-llm")  # which damps least
    for weight in weights_of(config):
        module: Any = small.get_submodule(weight.name)
        shorter = (weight.heads * SHORT, weight.in_features), (weight.out_features, weight.heads * SHORT)
        if weight.values:
            assert module.weight.shape == shorter[weight.values == "in"]
    assert (logits(small) - before).abs().max() < 1e-3 * before.abs().max()
    assert generates_the_same(small)


# --- what both keep -------------------------------------------------------------------------------------------------


@pytest.fixture
def config() -> Any:
    """With biases."""
    return small_config("llama", head_dim=HEAD_DIM, attention_bias=True)


@pytest.fixture(params=METHODS)
def form(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def small(form: str, config: Any, make_plan: MakePlan) -> PreTrainedModel:
    chosen = changes(config, form, SHORT) | {"model.layers.0.self_attn.q_proj": ("low_rank", 16)}
    return applied(small_model(config), make_plan(config, chosen), METHODS[form])


def test_at_the_full_dim_nothing_is_lost_and_a_bias_comes_along(form: str, config: Any, make_plan: MakePlan) -> None:
    before = logits(small_model(config))
    full = applied(small_model(config), make_plan(config, changes(config, form, HEAD_DIM)), METHODS[form])
    assert (logits(full) - before).abs().max() < 1e-4 * before.abs().max()


def test_inputs_can_be_fused(small: PreTrainedModel, form: str) -> None:
    other = share_inputs(copy.deepcopy(small), [form])
    keys = GROUPS * (HEAD_DIM if form == "head_dim" else SHORT)
    assert other.get_submodule("model.layers.0.self_attn.q_proj.fused").weight.shape[0] == 16 + keys + GROUPS * SHORT
    assert (logits(other) - logits(small)).abs().max() < 1e-5
    assert set(other.state_dict()) == set(small.state_dict())


@pytest.mark.parametrize("refit", ["none", "residual"])
def test_a_dense_plan_changes_nothing(refit: str, tiny_model: LlamaForCausalLM, make_plan: MakePlan) -> None:
    dense, plan = logits(tiny_model), with_recipe(make_plan(tiny_model.config, {}), refit=refit)
    assert torch.equal(logits(applied(tiny_model, plan)), dense)


def test_gate_and_up_in_one_weight_keep_the_same_neurons(make_plan: MakePlan) -> None:
    config, name = small_config("phi3"), "model.layers.0.mlp"
    dense = small_model(config).get_submodule(f"{name}.gate_up_proj").weight.tolist()
    changes = {f"{name}.gate_up_proj": ("narrow", 40), f"{name}.down_proj": ("narrow", 40)}
    small = applied(small_model(config), make_plan(config, changes))
    kept = [dense.index(row) for row in small.get_submodule(f"{name}.gate_up_proj").weight.tolist()]
    assert kept[40:] == [NEURONS + neuron for neuron in kept[:40]]
    assert max(kept[:40]) < NEURONS


def test_a_plan_for_another_model_is_refused_before_weights_are_read(make_plan: MakePlan, tmp_path: Path) -> None:
    plan, other = make_plan(small_config("llama"), {}), small_config("llama", num_hidden_layers=3)
    other.save_pretrained(tmp_path)
    for fuse in (False, True):
        with pytest.raises(PlanError, match="the plan is for tiny, which has 14 weights; expected 21 weights, as"):
            gac.compress(tmp_path, with_recipe(plan, fuse=fuse))
    other = small_config("llama")
    other.intermediate_size = 128
    with pytest.raises(PlanError, match=r"gate_proj of 176 x 64; expected .*gate_proj of 128 x 64, as"):
        changed_sites(plan, family_of(other).sites(other))
