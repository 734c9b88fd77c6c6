"""The model of a first shot: compressed, of the dense shapes, and beside a dense model that is left as it was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from gac.allocation.resolve import check_shots
from gac.compression import first_shot as shot
from gac.compression.first_shot import FIRST_KEPT, STEP, first_shot
from gac.core.errors import GacError
from gac.forms import form_named
from gac.forms.curvature.registry import METHODS
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import measure_curves
from gac.measurement.store import StatisticsStore
from gac.models.families import family_of
from gac.plan.costs import floored
from gac.plan.plan import WeightChoice
from gac.plan.recipe import Recipe
from tests.changed import with_recipe
from tests.compression.applying import applied, logits
from tests.compression.compressed import MakePlan
from tests.models.small import small_config, small_model

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
    recipe = Recipe.of(method=method, rule=rule)
    check_shots(recipe, METHODS.get(method), sites, model_type)
    recipe = replace(recipe, measure=replace(recipe.measure, shots=2))
    with pytest.raises(GacError, match=message):
        check_shots(recipe, METHODS.get(method), sites, model_type)
