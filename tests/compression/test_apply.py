"""From a plan to a smaller model: groups of heads, shorter values, pairs inside a narrower MLP, and a first shot."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import gac
from gac.allocation.resolve import check_shots
from gac.compression import first_shot as shot
from gac.compression.apply import changed_sites
from gac.compression.first_shot import FIRST_KEPT, STEP, first_shot
from gac.core.errors import GacError, PlanError
from gac.forms import form_named
from gac.forms.curvature.registry import METHODS
from gac.forms.latent import Latent
from gac.forms.planned_sites import check_forms_fit
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import measure_curves
from gac.measurement.store import StatisticsStore
from gac.models.families import family_of, supported
from gac.models.sites import Weight
from gac.plan.costs import floored
from gac.plan.plan import Plan, WeightChoice
from gac.plan.recipe import Recipe
from gac.runtime.fusion.shared_gemm import FusedInput
from gac.runtime.modules import LowRankLinear
from tests.changed import with_recipe
from tests.compression.applying import applied, generates_the_same, logits
from tests.compression.compressed import MakePlan, share_inputs
from tests.models.small import (
    NEURONS,
    STACKED,
    VALUE_LAYOUTS,
    WITHOUT_HEADS,
    every_layout,
    small_config,
    small_model,
    weights_of,
)
from tests.small_pipeline import Small

SHORT, GROUPS, HEAD_DIM = 8, 2, 16
K = Weight("k", 128, 96, heads=8, cached=True)
METHOD_OF = {"head_dim": "kfac", "latent:1": "palu:1"}


def changes(config: Any, form: str, dim: int) -> dict[str, tuple[str, int]]:
    """Every weight that can have the form has it."""
    return {weight.name: (form, dim) for weight in weights_of(config) if form_named(form).applies_to(weight)}


def test_heads_are_grouped_evenly() -> None:
    assert Latent(4).groups(Weight("k", 192, 576, heads=3, cached=True)) == 1
    with pytest.raises(PlanError, match="groups of 4 of the 6 heads of k; expected groups of 1, 2, 3, 6 heads"):
        Latent(4).groups(Weight("k", 96, 64, heads=6, cached=True))


def test_only_keys_and_values_take_it() -> None:
    taking = [name.rpartition(".")[2] for name in changes(small_config("llama"), "latent:2", 1)]
    assert taking == ["k_proj", "v_proj"] * 2


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
    values = {name: [weight for weight in weights_of(small_config(name)) if weight.values] for name in supported()}
    assert {name for name, weights in values.items() if not weights} == {*STACKED, *WITHOUT_HEADS}


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


@pytest.fixture
def config() -> Any:
    """With biases."""
    return small_config("llama", head_dim=HEAD_DIM, attention_bias=True)


@pytest.fixture(params=METHOD_OF)
def form(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def smaller(form: str, config: Any, make_plan: MakePlan) -> PreTrainedModel:
    chosen = changes(config, form, SHORT) | {"model.layers.0.self_attn.q_proj": ("low_rank", 16)}
    return applied(small_model(config), make_plan(config, chosen), METHOD_OF[form])


def test_at_the_full_dim_nothing_is_lost_and_a_bias_comes_along(form: str, config: Any, make_plan: MakePlan) -> None:
    before = logits(small_model(config))
    full = applied(small_model(config), make_plan(config, changes(config, form, HEAD_DIM)), METHOD_OF[form])
    assert (logits(full) - before).abs().max() < 1e-4 * before.abs().max()


def test_inputs_can_be_fused(smaller: PreTrainedModel, form: str) -> None:
    other = share_inputs(copy.deepcopy(smaller), [form])
    keys = GROUPS * (HEAD_DIM if form == "head_dim" else SHORT)
    assert other.get_submodule("model.layers.0.self_attn.q_proj.fused").weight.shape[0] == 16 + keys + GROUPS * SHORT
    assert (logits(other) - logits(smaller)).abs().max() < 1e-5
    assert set(other.state_dict()) == set(smaller.state_dict())


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


WIDTH = 128
PAIR = form_named(f"narrow_pair:{WIDTH}")
FORMS = ("low_rank", "narrow", "narrow_pair")


def with_pairs(config: Any, *pairs: str, rank: int | None = None) -> dict[str, tuple[str, int]]:
    """Every MLP narrower; those weights that are called so pairs, of their full rank or another."""
    found: dict[str, tuple[str, int]] = {}
    for weight in weights_of(config):
        if weight.neurons:
            pair = not pairs or weight.name.rpartition(".")[2] in pairs
            found[weight.name] = (PAIR.name, rank or PAIR.full(weight)) if pair else ("narrow", WIDTH)
    return found


@every_layout
def test_at_full_rank_it_is_the_narrower_model(model_type: str, make_plan: MakePlan) -> None:
    config = small_config(model_type)
    narrow = dict.fromkeys(with_pairs(config), ("narrow", WIDTH))
    expected = logits(applied(small_model(config), make_plan(config, narrow)))
    found = applied(small_model(config), make_plan(config, with_pairs(config)))
    for weight in weights_of(config):
        if weight.neurons:
            module = found.get_submodule(weight.name)
            assert isinstance(module, LowRankLinear)
            length = module.out_features if weight.neurons == "out" else module.in_features
            assert length == weight.blocks * WIDTH
    assert (logits(found) - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("pairs", [["gate_proj"], ["up_proj", "down_proj"]], ids="+".join)
def test_a_shared_gemm_takes_ranks_of_pairs_and_rows_of_the_others(pairs: list[str], make_plan: MakePlan) -> None:
    config = small_config("llama")
    plan = make_plan(config, with_pairs(config, *pairs, rank=24))
    model = applied(small_model(config), plan)
    apart = logits(model)
    fused = share_inputs(model, plan.recipe.space.forms).model.layers[0].mlp.gate_proj.fused
    assert isinstance(fused, FusedInput)
    assert fused.weight.shape[0] == 24 + WIDTH
    assert (logits(model) - apart).abs().max() < 1e-4 * apart.abs().max()


def test_from_a_budget_to_files_and_back(small: Small, tmp_path: Path) -> None:
    plan = small.allocate(0.4, forms=FORMS, align=False, fuse="auto")
    pairs = [site for site in plan.sites if any(form_named(one.form).parent_form_name for one in site.weights)]
    assert pairs
    assert plan.certificate.status == "optimal"
    model, _ = small.there_and_back(plan, tmp_path)
    kept = plan.measured.params - plan.budget.total + plan.budget.used
    assert sum(one.numel() for one in model.parameters()) == kept


def test_a_frontier_has_them_too(small: Small) -> None:
    found = small.frontier(points=3, forms=FORMS, align=8)
    assert any("narrow_pair" in form for site in found.sites for one in site.options for form in one.forms)
    assert found.plan(0).prediction.loss > 0


@pytest.fixture
def plan(make_plan: MakePlan) -> Plan:
    config = small_config("llama")
    return make_plan(config, with_pairs(config, "gate_proj", rank=24))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("narrow_pair:96", "site model.layers.0.mlp has narrow_pair:96 dim 24, narrow dim 128"),
        ("narrow_pair", "form narrow_pair of a weight"),
        ("narrow_pair:176", "gate_proj has the form narrow_pair:176"),
        ("narrow_pair:0", "form narrow_pair:0; expected narrow_pair:N"),
        ("dense", "site model.layers.0.mlp has dense dim 24, narrow dim 128"),
    ],
)
def test_an_edited_plan_is_refused(plan: Plan, form: str, message: str) -> None:
    at = next(at for at, site in enumerate(plan.sites) if site.kind == "mlp")
    site = plan.sites[at]
    first, *others = site.weights
    torn = replace(site, weights=(replace(first, form=form), *others))
    with pytest.raises(PlanError, match=message):
        replace(plan, sites=(*plan.sites[:at], torn, *plan.sites[at + 1 :]))


def test_a_rank_beyond_the_narrower_weight_is_refused(make_plan: MakePlan) -> None:
    config = small_config("llama", hidden_size=256, head_dim=64)
    with pytest.raises(PlanError, match=f"has narrow_pair:{WIDTH} dim 129; expected a dim from 1 to 128"):
        make_plan(config, with_pairs(config, "gate_proj", rank=129))


def test_a_parent_that_is_missing_and_a_width_that_no_mlp_has_are_refused() -> None:
    config = small_config("llama")
    sites = family_of(config).sites(config)
    check_forms_fit(sites, ("narrow", "narrow_pair:175"), "llama")
    with pytest.raises(PlanError, match="form narrow_pair without narrow"):
        check_forms_fit(sites, ("low_rank", "narrow_pair"), "llama")
    with pytest.raises(PlanError, match="form narrow_pair:176, which fits no weight of a llama model"):
        check_forms_fit(sites, ("narrow", "narrow_pair:176"), "llama")


def test_a_recipe_may_name_one_width(small: Small) -> None:
    plan = small.allocate(0.4, forms=("low_rank", "narrow", "narrow_pair:72"), align=False)
    assert {one.form for one in plan.weights if form_named(one.form).parent_form_name} == {"narrow_pair:72"}
    assert torch.isfinite(logits(small.compress(plan))).all()


WINDOWS = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(1))


def run_of(model: PreTrainedModel, folder: Path) -> CalibrationRun:
    return CalibrationRun(model, WINDOWS, METHODS.get("kfac"), StatisticsStore(folder), progress=False)


def made(model: PreTrainedModel, folder: Path) -> Any:
    return first_shot(run_of(model, folder))


def choices(model: PreTrainedModel, folder: Path) -> list[WeightChoice]:
    """What the first shot makes of every weight."""
    sites = family_of(model.config).sites(model.config)
    return shot._chosen(sites, measure_curves(run_of(model, folder), sites).curves)


@pytest.mark.parametrize("model_type", ["gpt2", "phi3"])
def test_it_computes_what_the_compressed_model_does(model_type: str, tmp_path: Path, make_plan: MakePlan) -> None:
    model = small_model(small_config(model_type))
    dense, first = logits(model, WINDOWS), logits(made(model, tmp_path), WINDOWS)
    assert (first - dense).norm() > 1e-4 * dense.norm()
    chosen = {choice.name: (choice.form, choice.dim) for choice in choices(model, tmp_path)}
    plan = with_recipe(make_plan(model.config, chosen), refit="residual")
    assert (first - logits(applied(model, plan, ids=WINDOWS), WINDOWS)).norm() < 1e-5 * dense.norm()


def test_it_keeps_its_fraction_in_aligned_dims(tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    found = choices(tiny_model, tmp_path)
    whole = sum(choice.weight.params for choice in found)
    assert 0.95 * FIRST_KEPT * whole < sum(choice.params for choice in found) <= floored(FIRST_KEPT, whole)
    assert {choice.dim % STEP for choice in found if choice.form != "dense"} == {0}
    assert len({form_named(choice.form).module(choice.weight, choice.dim).module for choice in found}) > 1


def test_it_shares_what_is_not_compressed_and_leaves_the_dense_model(
    tiny_model: LlamaForCausalLM, tmp_path: Path
) -> None:
    before, modules = logits(tiny_model), dict(tiny_model.named_modules())
    first = made(tiny_model.train(), tmp_path)
    assert first.lm_head.weight is tiny_model.lm_head.weight
    assert first.model.layers[0].input_layernorm.weight is tiny_model.model.layers[0].input_layernorm.weight
    shapes = {name: tensor.shape for name, tensor in tiny_model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in first.state_dict().items()} == shapes
    assert tiny_model.training
    assert dict(tiny_model.named_modules()) == modules
    assert torch.equal(logits(tiny_model.eval()), before)


def test_it_is_the_same_from_kept_statistics(tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    once, again = (made(tiny_model, tmp_path).state_dict() for _ in range(2))
    other = made(tiny_model, tmp_path / "other").state_dict()
    assert all(torch.equal(once[name], again[name]) and torch.equal(once[name], other[name]) for name in once)


@pytest.mark.parametrize(
    ("model_type", "method", "rule", "message"),
    [
        ("llama", "svd", "loss", "shots=2 with method svd, .* without the gradients of single outputs"),
        ("llama", "kfac", "zero-sum", "shots=2 with rule zero-sum; expected rule loss"),
        ("opt", "kfac", "loss", "shots=2 of model type opt, in which the residual stream itself passes norms"),
    ],
)
def test_what_goes_with_no_second_shot_is_refused(model_type: str, method: str, rule: str, message: str) -> None:
    config = small_config(model_type, **({"do_layer_norm_before": False} if model_type == "opt" else {}))
    sites = family_of(config).sites(config)
    recipe = Recipe.of(method=method, rule=rule, shots=2)
    with pytest.raises(GacError, match=message):
        check_shots(recipe, METHODS.get(method), sites, model_type)
