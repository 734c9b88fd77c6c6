"""The losses of fewer experts, against a mixture that is written out by hand."""

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from gac.core.errors import PlanError
from gac.forms.curvature.metric import FACTOR
from gac.forms.curvature.registry import METHODS
from gac.forms.experts import compensation, widths
from gac.forms.planned_sites import targeted_sites
from gac.measurement import routed
from gac.measurement.calibration import CalibrationRun, TextOfMixture
from gac.measurement.curves import LayerFit, fit_layers, measure_curves
from gac.measurement.runs import drawn_loss
from gac.measurement.store import temporary_store
from gac.models.examples import Example, Examples
from tests.models.small import EXPERT_NEURONS, small_config, small_model, with_random_mlps

IDS = torch.arange(96).reshape(4, 24) * 7 % 251
LAYER = 1
EXPERTS, TOP_K = 8, 2
STACK = f"model.layers.{LAYER}.mlp.experts"
CASES = [("mixtral", None), ("qwen3_moe", True), ("qwen3_moe", False), ("glm4_moe", None), ("deepseek_v3", None)]
GROUPS = {"deepseek_v3": 2}  # of which each token takes one; their routers and GLM's have biases
mixtures = pytest.mark.parametrize(("model_type", "normalised"), CASES)


def model_of(model_type: str, normalised: bool | None) -> Any:
    """A mixture whose experts and choices differ more than random ones do."""
    named: dict[str, Any] = {} if normalised is None else {"norm_topk_prob": normalised}
    named |= {"n_group": GROUPS.get(model_type, 1), "topk_group": 1}
    model: Any = small_model(small_config(model_type, **named))
    if hasattr(router := model.model.layers[LAYER].mlp.gate, "e_score_correction_bias"):
        router.e_score_correction_bias.copy_(torch.linspace(0.4, -0.4, EXPERTS))
    if normalised is not None:
        model.config.norm_topk_prob = normalised
    return with_random_mlps(model, 1, 0.2)


def run_of(model: Any, method: str = "kfac", ids: Tensor = IDS) -> CalibrationRun:
    return CalibrationRun(model, ids, METHODS.get(method), progress=False)


def fit_of(model: Any, ids: Tensor = IDS) -> LayerFit:
    sites = [site for site in targeted_sites(model.config, ["experts"]) if site.layer == LAYER]
    return fit_layers(run_of(model, ids=ids), sites, forms=["experts"])[LAYER]


def heard(model: Any) -> tuple[Tensor, Tensor]:
    """Inputs of the experts, and the gradients at their output under labels that the model draws, of all tokens."""
    inputs, gradients = [], []

    def hear(_module: Any, args: Any, output: Tensor) -> None:
        inputs.append(args[0].detach().double())
        output.register_hook(lambda gradient: gradients.append(gradient.double()))

    hook = model.get_submodule(STACK).register_forward_hook(hear)
    for number, ids in enumerate(IDS):
        drawn_loss(model, ids, "a window", seed=number)[1].backward()
    hook.remove()
    return torch.cat(inputs), torch.cat(gradients)


def taken(model: Any, x: Tensor, kept: list[int], normalised: bool | None) -> dict[int, float]:
    """The experts that a token takes of some, with their weights."""
    router = model.model.layers[LAYER].mlp.gate
    scores = router.weight.double() @ x
    if not hasattr(router, "e_score_correction_bias"):
        chances = dict(zip(kept, scores[kept].softmax(0).tolist(), strict=True))
        chosen = sorted(kept, key=chances.__getitem__, reverse=True)[:TOP_K]
        total = sum(chances[expert] for expert in chosen) if normalised is not False else 1
        return {expert: chances[expert] / total for expert in chosen}
    gates = scores.detach().sigmoid()
    corrected = (gates + router.e_score_correction_bias).tolist()

    def of_group(group: list[int]) -> float:
        return sum(sorted((corrected[expert] for expert in group), reverse=True)[:2])

    best = max(groups_of(model.config.model_type, kept), key=of_group)
    chosen = sorted(best, key=corrected.__getitem__, reverse=True)[:TOP_K]
    total = float(gates[chosen].sum()) / model.config.routed_scaling_factor
    return {expert: float(gates[expert]) / total for expert in chosen}


def groups_of(model_type: str, kept: list[int]) -> list[list[int]]:
    count = GROUPS.get(model_type, 1)
    return [[expert for expert in kept if expert * count // EXPERTS == group] for group in range(count)]


def mixture(model: Any, inputs: Tensor, kept: list[int], normalised: bool | None) -> Tensor:
    """What the layer's routed experts write, with some of them."""
    result = torch.zeros_like(inputs)
    for token, x in enumerate(inputs):
        for expert, weight in taken(model, x, kept, normalised).items():
            result[token] += weight * written(model, expert, x)
    return result


def written(model: Any, expert: int, x: Tensor) -> Tensor:
    experts = model.model.layers[LAYER].mlp.experts
    gate, up = (experts.gate_up_proj[expert].detach().double() @ x).chunk(2)
    result: Tensor = experts.down_proj[expert].detach().double() @ (silu(gate) * up)
    return result


@mixtures
def test_losses_are_those_of_a_mixture_written_out(
    model_type: str, normalised: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compensation, "DAMPING", (math.inf,))  # experts that stay do not take over
    model = model_of(model_type, normalised)
    fit = fit_of(model)
    inputs, gradients = heard(model)
    with torch.no_grad():
        dense = mixture(model, inputs, [*range(EXPERTS)], normalised)
        counts = gradients.norm(dim=1) ** 2
        curvature = gradients.T @ gradients / len(gradients)

        def loss(kept: list[int]) -> float:
            less = mixture(model, inputs, kept, normalised) - dense
            costs = torch.einsum("ti,ij,tj->t", less, curvature, less)
            return FACTOR * float((counts / counts.mean() * costs).mean())

        kept, order, losses = [*range(EXPERTS)], [], [0.0]
        groups = GROUPS.get(model_type, 1)
        least = groups * TOP_K
        while len(kept) > least:
            largest = max(map(len, groups_of(model_type, kept)))
            next_to_go = [each for group in groups_of(model_type, kept) if len(group) == largest for each in group]
            prices = {expert: loss([other for other in kept if other != expert]) for expert in next_to_go}
            order.append(min(prices, key=prices.__getitem__))
            losses.append(prices[order[-1]])
            kept.remove(order[-1])
    measured = fit.losses[f"experts/{STACK}"]
    assert fit.artifacts.tensors[f"experts.order/{STACK}"][: EXPERTS - least].tolist() == order
    # Each expert that is gone is taken by one token more than those that the text has shown.
    unseen = 0.0
    for token, x in enumerate(inputs):
        for expert, chance in taken(model, x, [*range(EXPERTS)], normalised).items():
            wrote = chance * written(model, expert, x)
            unseen += (
                FACTOR * float(counts[token] / counts.mean() * (wrote @ curvature @ wrote)) / len(inputs) ** 2 / TOP_K
            )
    expected = np.maximum.accumulate(losses + unseen * np.arange(len(losses)))[::-1]
    np.testing.assert_allclose(measured[least:], expected, rtol=1e-5)
    assert measured[least] > measured[EXPERTS - groups] > 0
    assert (measured[:least] == measured[least]).all()


def test_what_stays_takes_over_a_part_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mixtral", None)
    with torch.no_grad():  # what an expert writes, another one can write
        experts = model.model.layers[LAYER].mlp.experts
        for pair in range(0, EXPERTS, 2):
            experts.gate_up_proj[pair + 1] = experts.gate_up_proj[pair]
    ids = torch.randint(0, 251, (16, 64), generator=torch.Generator().manual_seed(0))
    loss = fit_of(model, ids).losses[f"experts/{STACK}"]
    monkeypatch.setattr(compensation, "DAMPING", (math.inf,))
    alone = fit_of(model, ids).losses[f"experts/{STACK}"]
    assert (loss <= alone).all()
    assert loss[TOP_K + 1] < 0.8 * alone[TOP_K + 1]


def test_what_held_out_tokens_never_needed_has_a_small_price() -> None:
    ids = IDS.flatten()[16:48][None]  # some counts lose nothing of the held-out half before others take over
    assert 0 < fit_of(model_of("glm4_moe", None), ids).losses[f"experts/{STACK}"].max() < 0.1


def test_a_method_without_gradients_counts_every_token_alike() -> None:
    model = model_of("mixtral", None)
    assert METHODS.get("svd-llm").power == 0
    run = run_of(model, "svd-llm")
    sites = targeted_sites(model.config, ["experts"])
    curves = measure_curves(run, sites, forms=["experts"]).curves
    assert curves.by_key["experts", "bf16", STACK].loss[TOP_K] > 0


def test_a_sample_of_tokens_is_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mixtral", None)
    complete = fit_of(model).losses[f"experts/{STACK}"]
    monkeypatch.setattr(routed, "TOKENS", 48)
    part, again = (fit_of(model).losses[f"experts/{STACK}"] for _ in range(2))
    assert (part == again).all()
    assert not np.allclose(part[TOP_K:EXPERTS], complete[TOP_K:EXPERTS])


def test_experts_that_no_token_reached_go_first_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("mixtral", None)
    with torch.no_grad():  # of two opposite scores one is above 0, and so the other four are never among the first
        weight = model.model.layers[LAYER].mlp.gate.weight
        weight[4:] = 0
        weight[1], weight[3] = -weight[0], -weight[2]
    with caplog.at_level(logging.WARNING, "gac"):
        fit = fit_of(model)
    assert f"{STACK}: no token of the calibration text reached experts 4, 5, 6, 7" in caplog.text
    reached = fit.losses[f"reached/{STACK}"]
    assert reached.sum() == TOP_K * IDS.numel()
    assert (reached[4:] == 0).all()
    losses = fit.losses[f"experts/{STACK}"]
    assert losses[4] < 0.1 * losses[3]
    np.testing.assert_allclose(losses[4:8], losses[7] * np.array([4, 3, 2, 1]), rtol=0.05)


def test_experts_that_all_work_on_every_token_can_be_narrower_alone() -> None:
    model = small_model(small_config("mixtral", num_local_experts=2))
    fit = fit_of(model)
    assert (fit.losses[f"experts/{STACK}"] == 0).all()
    assert fit.losses[f"experts:{widths(EXPERT_NEURONS)[-1]}/{STACK}"][TOP_K] > 0


def test_tokens_of_two_texts_count_by_their_shares() -> None:
    model = model_of("mixtral", None)
    parts = [fit_of(model, IDS[:1]), fit_of(model, IDS[1:])]
    run = run_of(model)
    texts = [TextOfMixture(windows, temporary_store()) for windows in ((0,), (1, 2, 3))]
    sites = [site for site in targeted_sites(model.config, ["experts"]) if site.layer == LAYER]
    mixed = fit_layers(replace(run, texts=tuple(texts)), sites, forms=["experts"])[LAYER]
    assert len(mixed.artifacts.tensors[f"experts.inputs/{STACK}"]) == IDS.numel()
    joint = sum(
        share * part.artifacts.tensors[f"experts.gradients/{STACK}"]
        for share, part in zip((0.25, 0.75), parts, strict=True)
    )
    torch.testing.assert_close(mixed.artifacts.tensors[f"experts.gradients/{STACK}"], joint)
    assert float(mixed.artifacts.tensors[f"experts.counts/{STACK}"].mean()) == pytest.approx(1, rel=1e-5)


def test_text_about_images_is_refused() -> None:
    window = Example(IDS[0], {"pixel_values": torch.zeros(1)}, IDS.shape[1], torch.ones(IDS.shape[1], dtype=torch.bool))
    with pytest.raises(PlanError, match="experts with text about images"):
        routed.check_text_alone(Examples((window,)))
    routed.check_text_alone(IDS)
