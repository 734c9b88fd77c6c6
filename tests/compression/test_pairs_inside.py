"""Pairs inside a narrower MLP: in every architecture, from a plan to a model and back from its files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gac.core.errors import PlanError
from gac.forms import form_named
from gac.forms.planned_sites import check_forms_fit
from gac.models.families import family_of
from gac.plan.plan import Plan
from gac.runtime.fusion.shared_gemm import FusedInput
from gac.runtime.modules import LowRankLinear
from tests.compression.applying import applied, logits
from tests.compression.compressed import MakePlan, share_inputs
from tests.models.small import every_layout, small_config, small_model, weights_of
from tests.small_pipeline import Small

WIDTH = 128
PAIR = form_named(f"narrow_pair:{WIDTH}")
FORMS = ("low_rank", "narrow", "narrow_pair")


def changes(config: Any, *pairs: str, rank: int | None = None) -> dict[str, tuple[str, int]]:
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
    narrow = dict.fromkeys(changes(config), ("narrow", WIDTH))
    expected = logits(applied(small_model(config), make_plan(config, narrow)))
    found = applied(small_model(config), make_plan(config, changes(config)))
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
    plan = make_plan(config, changes(config, *pairs, rank=24))
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


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(make_plan: MakePlan) -> Plan:
    config = small_config("llama")
    return make_plan(config, changes(config, "gate_proj", rank=24))


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
        make_plan(config, changes(config, "gate_proj", rank=129))


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
