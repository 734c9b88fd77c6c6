"""Attentions with fewer heads, in every family: which go, what that loses, what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gac.compression.apply import build_modules
from gac.core.errors import PlanError
from gac.forms import form_named
from gac.forms.curvature.metric import Metric
from gac.forms.curvature.registry import METHODS
from gac.forms.heads.torch import AFTER_REFIT, eliminate_groups
from gac.forms.planned_sites import as_planned, check_forms_fit
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import fit_layers
from gac.models.families import FIXED_HEADS, family_of, supported
from gac.models.modules import swap_in
from gac.plan.plan import WeightChoice
from tests.compression.applying import applied, divergence, generates_the_same, logits
from tests.compression.compressed import MakePlan
from tests.models.small import LAYOUTS, small_config, small_model, weights_of

HEADS = form_named("heads")


def applies_to(model_type: str, **changed: Any) -> bool:
    return any(map(HEADS.applies_to, weights_of(small_config(model_type, **changed))))


def test_most_architectures_have_heads_to_drop() -> None:
    fixed = {"gpt2", "gpt_neox", "phi3", *FIXED_HEADS}
    assert {name for name in supported() if not applies_to(name)} == fixed
    config = small_config("gpt2")
    with pytest.raises(PlanError, match="form heads, which fits no weight of a gpt2 model"):
        check_forms_fit(family_of(config).sites(config), ["heads"], "gpt2")


@pytest.mark.parametrize(
    ("model_type", "changed"),
    [("cohere", {"use_qk_norm": True}), ("llama", {"num_key_value_heads": 1}), ("llama", {"num_key_value_heads": 3})],
)
def test_a_config_may_leave_none_to_drop(model_type: str, changed: dict[str, Any]) -> None:
    assert not applies_to(model_type, **changed)


def test_an_attention_is_one_site() -> None:
    config = small_config("llama")
    planned = as_planned(family_of(config).sites(config), ["heads"], fused=False)
    assert [site.kind for site in planned] == ["q_proj+k_proj+v_proj+o_proj", "mlp"] * 2
    fused = as_planned(family_of(config).sites(config), ["heads"], fused="auto")
    assert [site.fused for site in fused] == [(0, 1, 2), (0, 1)] * 2


# --- which go -------------------------------------------------------------------------------------------------------


def lost(weight: Tensor, metric: Metric, kept: Tensor) -> float:
    """tr(G E A E^T) of the best o_proj that reads only these columns."""
    inputs = metric.inputs
    solved = weight @ inputs[:, kept] @ torch.linalg.inv(inputs[kept][:, kept])
    error = weight.clone()
    error[:, kept] -= solved
    return float((metric.gradients @ error @ inputs @ error.T).trace())


def test_groups_go_as_their_loss_says() -> None:
    torch.manual_seed(0)
    groups, length = 4, 6
    weight = torch.randn(10, groups * length, dtype=torch.float64)
    metric = Metric(*(root @ root.T for root in (torch.randn(n, 2 * n, dtype=torch.float64) for n in (24, 10))))
    order = eliminate_groups(weight, metric, groups)
    inside = torch.arange(groups * length).view(groups, length)
    for gone in range(1, groups):
        before = order[: gone - 1].tolist()
        without = {
            group: lost(weight, metric, inside[[n for n in range(groups) if n not in [*before, group]]].flatten())
            for group in range(groups)
            if group not in before
        }
        assert order[gone - 1] == min(without, key=lambda group: without[group])


@pytest.mark.parametrize("model_type", filter(applies_to, LAYOUTS))
def test_nothing_is_lost_with_heads_that_write_nothing(model_type: str, make_plan: MakePlan) -> None:
    config = small_config(model_type)
    dense = small_model(config)
    family = family_of(config)
    with torch.no_grad():
        for layer, group in ((0, 1), (1, 0)):  # another group in each layer
            output: Any = dense.get_submodule(f"{family.layers}.{layer}.{family.output}")
            output.weight.view(64, 2, -1)[:, group] = 0
    plan = make_plan(config, {weight.name: ("heads", 1) for weight in weights_of(config) if HEADS.applies_to(weight)})
    small: Any = applied(copy.deepcopy(dense), plan, "svd-llm")
    assert (logits(small) - logits(dense)).abs().max() < 1e-3 * logits(dense).abs().max()
    assert generates_the_same(small)


@pytest.mark.parametrize("dim", [0, 3])
def test_no_heads_and_more_than_there_are_is_refused(dim: int, make_plan: MakePlan) -> None:
    config = small_config("llama")
    changes = {weight.name: ("heads", dim) for weight in weights_of(config)[:4]}
    with pytest.raises(PlanError, match=f"has heads dim {dim}; expected a dim from 1 to 2"):
        make_plan(config, changes)


def test_what_a_number_of_heads_loses_is_measured_by_running_the_model() -> None:
    model = small_model(small_config("llama", num_key_value_heads=4))
    run = CalibrationRun(model, torch.arange(60).reshape(2, 30), METHODS.get("kfac"), progress=False)
    sites = [site for site in as_planned(family_of(model.config).sites(model.config), ["heads"], False) if site.layer]
    fits = fit_layers(run, sites, forms=["heads"])
    attention = sites[0]
    output = attention.weights[-1]
    loss = fits[1].losses[f"heads/{output.name}"]
    assert loss[0] == loss[1]
    assert (loss[:-1] >= loss[1:]).all()
    with torch.no_grad():
        dense = model(run.windows).logits
    measured: dict[int, float] = {}
    for dim in (1, 2, 3):
        choices = [WeightChoice(weight, "heads", dim) for weight in attention.weights]
        fewer = copy.deepcopy(model)
        swap_in(fewer, build_modules(run, choices, [attention], fits))
        with torch.no_grad():
            changed = fewer(run.windows).logits
        measured[dim] = divergence(dense, changed)
    never_rising = [max(measured[other] for other in range(dim, 4)) for dim in (1, 2, 3)]
    assert (loss[1:4] / AFTER_REFIT).tolist() == pytest.approx(never_rising, rel=1e-4)
