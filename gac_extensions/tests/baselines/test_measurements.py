"""Measurements of the peers' rules, compared with the model itself."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from gac.allocation.rules import RULES
from gac.core.arrays import Floats
from gac.core.errors import ModelError
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.registry import METHODS
from gac.forms.decomposition import Decomposition, decompose
from gac.measurement.calibration import CalibrationRun, stream_moments
from gac.measurement.store import StatisticsStore, temporary_store
from gac.measurement.weight_measurements import measure_weights
from gac.models.families import family_of
from gac.models.sites import Site, Weight
from gac_extensions.baselines import measurements
from gac_extensions.baselines.measurements import KEPT_FRACTIONS, mean_gradients
from tests.models.small import small_config, small_model, weights_of

MEASURING = ("zero-sum", "sensitivity:down8")
METHOD = METHODS.get("svd-llm")
NAME = "model.layers.1.mlp.gate_proj"


WINDOWS = torch.randint(258, (6, 32), generator=torch.Generator().manual_seed(1))


def sites_of(model: Any) -> tuple[Site, ...]:
    return family_of(model.config).sites(model.config)


def run_of(model: Any, store: StatisticsStore | None = None, windows: Tensor = WINDOWS) -> CalibrationRun:
    return CalibrationRun(model, windows, METHOD, store or temporary_store(), progress=False)


def measured(
    rule: str, model: Any, store: StatisticsStore | None = None, windows: Tensor = WINDOWS
) -> Mapping[str, Floats]:
    needs = RULES.get(rule).needs
    assert needs is not None
    return measure_weights(needs, run_of(model, store, windows), sites_of(model))


def gradients(model: Any) -> dict[str, Tensor]:
    return mean_gradients(model, weights_of(model.config), WINDOWS, progress=False)


def decomposed(model: Any) -> Decomposition:
    """Of the weight NAME."""
    weight = next(weight for weight in weights_of(model.config) if weight.name == NAME)
    moments = dict(stream_moments(run_of(model), sites_of(model)))
    return decompose(model.get_parameter(f"{NAME}.weight"), METHOD.metric(moments[1].of(weight)))


def loss(model: LlamaForCausalLM, windows: Tensor) -> float:
    with torch.no_grad():
        logits = model(windows).logits[:, :-1].double()
    return float(cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def test_a_change_is_the_slope_of_the_loss_in_its_component(tiny_model: LlamaForCausalLM) -> None:
    tiny_model.double()
    changes = measured("zero-sum", tiny_model)[NAME]
    parts = decomposed(tiny_model)
    weight = tiny_model.get_parameter(f"{NAME}.weight")
    step = 0.05  # norms run in float32, so that smaller steps drown in rounding
    for index in (0, 5, 63):
        component = torch.outer(parts.second[:, index], parts.first[index])
        with torch.no_grad():
            weight.sub_(step * component)
            less = loss(tiny_model, WINDOWS)
            weight.add_(2 * step * component)
            more = loss(tiny_model, WINDOWS)
            weight.sub_(step * component)
        assert changes[index] == pytest.approx((less - more) / (2 * step), rel=1e-2, abs=1e-6)


def test_a_loss_is_that_of_the_model_with_that_weight_truncated(tiny_model: LlamaForCausalLM) -> None:
    truncated = measured("sensitivity", tiny_model)[NAME]
    assert truncated[:, 0].tolist() == [int(176 * 64 * fraction / 240) for fraction in KEPT_FRACTIONS]
    second, first = decomposed(tiny_model).factors(int(truncated[2, 0]))
    with torch.no_grad():
        tiny_model.get_parameter(f"{NAME}.weight").copy_(second @ first)
    assert truncated[2, 1] == pytest.approx(loss(tiny_model, WINDOWS[: measurements.WINDOWS]), rel=1e-5)


@pytest.mark.parametrize("rule", MEASURING)
def test_the_model_is_left_as_it_was(rule: str, tiny_model: LlamaForCausalLM) -> None:
    tiny_model.train()
    tiny_model.model.norm.eval()
    still = {"lm_head.weight", f"{NAME}.weight"}
    for name in still:
        tiny_model.get_parameter(name).requires_grad_(False)
    before = copy.deepcopy(tiny_model.state_dict())
    measured(rule, tiny_model, windows=WINDOWS[:2])
    assert [name for name, module in tiny_model.named_modules() if not module.training] == ["model.norm"]
    assert {name for name, value in tiny_model.named_parameters() if not value.requires_grad} == still
    assert all(value.grad is None for value in tiny_model.parameters())
    assert all(torch.equal(before[name], value) for name, value in tiny_model.state_dict().items())


@pytest.mark.parametrize("rule", MEASURING)
def test_a_layer_is_measured_once(rule: str, tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    store = StatisticsStore(tmp_path)
    first = measured(rule, tiny_model, store, WINDOWS[:2])
    (tmp_path / f"{rule.partition(':')[0]}-svd-llm-0001.safetensors").unlink()
    tiny_model.model.embed_tokens.weight.data.zero_()
    again = measured(rule, tiny_model, store, WINDOWS[:2])
    assert set(again) == set(first)
    name = "model.layers.0.self_attn.q_proj"
    assert np.array_equal(again[name], first[name])
    assert not np.array_equal(again[NAME], first[NAME])


def test_a_loss_that_overflows_is_named(tiny_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = copy.deepcopy(tiny_model.state_dict())
    every_rank = measurements.every_rank

    def overflowing(artifacts: LayerArtifacts, weight: Weight) -> tuple[Tensor, Tensor]:
        second, first = every_rank(artifacts, weight)
        return (second * torch.inf if weight.name == NAME else second), first

    monkeypatch.setattr(measurements, "every_rank", overflowing)
    with pytest.raises(ModelError) as caught:
        measured("sensitivity", tiny_model)
    assert str(caught.value) == (
        f"the loss of a calibration window with {NAME} at rank 4 is nan; expected a finite loss. "
        "Load the model in bfloat16 or float32, and check its weights."
    )
    assert all(torch.equal(before[name], value) for name, value in tiny_model.state_dict().items())


def test_a_gradient_that_is_not_finite_is_refused(tiny_model: LlamaForCausalLM) -> None:
    tiny_model.get_parameter(f"{NAME}.weight").register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(ModelError, match=r"the gradient of model\.layers\.1\.mlp\.gate_proj is not finite"):
        gradients(tiny_model)


def test_weights_that_are_kept_the_other_way_round() -> None:
    """GPT-2 keeps its weights as (in, out)."""
    model: Any = small_model(small_config("gpt2"))
    changes = gradients(model)
    logits = model(WINDOWS).logits[:, :-1]
    cross_entropy(logits.flatten(0, 1), WINDOWS[:, 1:].flatten()).backward()
    for weight in weights_of(model.config):
        assert changes[weight.name].shape == (weight.out_features, weight.in_features)
        assert torch.allclose(changes[weight.name], model.get_parameter(f"{weight.name}.weight").grad.T, atol=1e-6)
