"""Models with fewer experts in some layers: compressed, saved, loaded in three ways, or refused."""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import gac
from gac.core.errors import BudgetError, CheckpointError, PlanError
from gac.forms.experts import compensation
from gac.forms.experts.compensation import Remainder
from gac.models.families import family_of
from gac.models.streaming import streamed
from tests.compression.applying import IDS, logits
from tests.models.small import EXPERT_NEURONS, MIXTURES, small_config, small_model, with_random_mlps
from tests.refused import assert_refused
from tests.small_pipeline import Small, has_state, state_of
from tests.without_gac import WithoutGac

FEW = ("mixtral", "qwen2_moe", "gpt_oss", "glm4_moe")
"""The plain layout; with a shared expert, and weights that are not normalised; with biases and transposed experts; with
groups of experts, and a bias that corrects the choice."""
TRANSPOSED = ("aria_text", "gpt_oss")


def can_lose_experts(model_type: str) -> bool:
    experts = family_of(small_config(model_type)).experts
    return experts is not None and experts.removable


OTHERS = [name for name in MIXTURES if can_lose_experts(name) and name not in FEW]
removable = pytest.mark.parametrize(
    "model_type", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)


def model_of(model_type: str) -> Any:
    return with_biases(small_model(small_config(model_type, num_hidden_layers=3)))


def with_biases(model: Any) -> Any:
    """The model with random corrections of what its routers choose."""
    torch.manual_seed(3)
    for name, values in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(("correction_bias", "expert_bias")):
            values.data.copy_(0.3 * torch.randn_like(values))
    return model


def mixing(model_type: str) -> Any:
    """A mixture whose experts differ more."""
    return with_random_mlps(model_of(model_type), 0, 0.15)


def counts_of(plan: gac.Plan) -> dict[str, int]:
    return {choice.name: choice.dim for choice in plan.weights if choice.form.startswith("experts")}


def width_of(plan: gac.Plan, name: str) -> int:
    choice = next(choice for choice in plan.weights if choice.name == name)
    return choice.module.sizes["width"]


def neurons_of(expert: torch.Tensor, key: str, model_type: str) -> torch.Tensor:
    """What of an expert stays or goes as it is: the weights of a neuron, or all of them."""
    if not key.startswith("gate_up_proj"):
        return expert.flatten()[None]
    return expert.mT.contiguous() if model_type in TRANSPOSED and expert.ndim == 2 else expert


def experts_alone(small: Small, model: Any, budget: float = 0.6, **changed: Any) -> gac.Plan:
    return small.allocate(budget, model=model, forms=["experts"], **{"latency": "any", **changed})


@removable
def test_from_a_plan_to_a_checkpoint_and_back(
    model_type: str, small: Small, without_gac: WithoutGac, tmp_path: Path
) -> None:
    dense = model_of(model_type)
    before = state_of(dense)
    plan = small.allocate(0.6, model=dense, forms=("low_rank", "experts"), schemes=("bf16", "w8a16"), workloads=())
    assert all(width_of(plan, name) < EXPERT_NEURONS for name in counts_of(plan) if name.endswith("experts"))
    assert plan.measured.experts is None
    model: Any = small.compress(plan, model=dense)
    gac.save(model, tmp_path / "saved")
    verified = gac.verify(tmp_path / "saved")
    assert verified.tensors == len(model.state_dict().keys() - model.all_tied_weights_keys.keys())
    loaded: Any = gac.load(tmp_path / "saved", verify=True)
    assert has_state(loaded, state_of(model))
    torch.testing.assert_close(logits(loaded), logits(model))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(IDS, **options), loaded.generate(IDS, use_cache=False, **options))

    for name, count in counts_of(plan).items():
        for key, values in loaded.get_submodule(name).state_dict().items():
            rows, values = (each.squeeze(0) for each in (before[f"{name}.{key}"], values))  # ERNIE's bias is a row
            assert len(values) == count <= len(rows)
            if key != "down_proj":  # which is fitted again
                parts = {part.numpy().tobytes() for expert in rows for part in neurons_of(expert, key, model_type)}
                assert all(
                    part.numpy().tobytes() in parts for expert in values for part in neurons_of(expert, key, model_type)
                )

    without_gac.check(tmp_path / "saved", model)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_a_layer_with_fewer_experts_is_the_dense_one_without_the_others(
    model_type: str, small: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GAC_HOME", str(tmp_path))
    monkeypatch.setattr(compensation, "DAMPING", (math.inf,))
    for module in ("gac.forms.experts.widths", "gac.forms.experts.torch.widths"):
        monkeypatch.setattr(module, lambda _neurons: ())
    dense = model_of(model_type)
    plan = experts_alone(small, dense, refit="none")
    model: Any = small.compress(plan, model=model_of(model_type))
    for name in (name for name in counts_of(plan) if name.endswith("gate")):
        router, fewer = dense.get_submodule(name), model.get_submodule(name)
        kept = [
            next(row for row, values in enumerate(router.weight) if torch.equal(values, each)) for each in fewer.weight
        ]
        x = torch.randn(50, 64)
        scores = torch.full((50, 8), -torch.inf).index_copy(1, torch.tensor(kept), router(x)[0][:, kept])
        block = name.removesuffix(".gate")
        gone = [expert for expert in range(8) if expert not in kept]
        with torch.no_grad():  # with scores so low that the softmax gives them nothing
            chances, numbers = scores.softmax(-1).topk(2)
            if model_type == "mixtral" or model.config.norm_topk_prob:
                chances = chances / chances.sum(-1, keepdim=True)
            expected = dense.get_submodule(f"{block}.experts")(x, numbers, chances)
            torch.testing.assert_close(model.get_submodule(block)(x[None])[0], expected)
        assert not set(gone) & set(numbers.flatten().tolist())


def test_the_predicted_loss_is_that_of_the_model(small: Small) -> None:
    dense = mixing("mixtral")
    plan = experts_alone(small, dense, 0.75, refit="none")
    ids = torch.tensor(small.tokenizer(small.text.read_text())["input_ids"][-512:]).view(8, 64)
    was = logits(dense, ids).log_softmax(-1)
    now = logits(small.compress(plan, model=dense), ids).log_softmax(-1)
    lost = float((was.exp() * (was - now)).sum(-1).mean())
    assert 0.3 < lost / plan.prediction.loss < 3, (lost, plan.prediction.loss)


def test_experts_that_stay_take_over_what_others_wrote(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor(small.tokenizer(small.text.read_text())["input_ids"][-1024:]).view(16, 64)

    def lost(dense: Any, plan: gac.Plan) -> float:
        was = logits(dense, ids).log_softmax(-1)
        now = logits(small.compress(plan, model=deepcopy(dense)), ids).log_softmax(-1)
        return float((was.exp() * (was - now)).sum(-1).mean())

    dense = mixing("mixtral")
    text = f"{small.text}:24x64"
    plan = experts_alone(small, dense, 0.5, refit="none", calibration=text)
    compensating = lost(dense, plan)
    monkeypatch.setattr(Remainder, "down_proj", lambda self, _damping: self.experts.down_proj.detach())
    assert compensating < 0.95 * lost(dense, plan)


def test_experts_are_chosen_beside_the_forms_of_other_weights(small: Small) -> None:
    plan = small.allocate(0.6, model=model_of("qwen2_moe"), forms=("low_rank", "narrow", "experts"))
    forms = {choice.form for choice in plan.weights}
    assert any(form.startswith("experts") for form in forms)
    assert forms & {"low_rank", "narrow"}
    assert plan.size.used <= 0.6 * plan.size.total
    assert all(latency == 0 for site in plan.sites if site.kind == "experts" for latency in site.latency_ns)


def test_budgets_below_the_experts_of_a_token_are_refused(small: Small) -> None:
    dense = model_of("mixtral")
    assert_refused(lambda: experts_alone(small, dense, 0.1), "a limit of", "experts can reach", error=BudgetError)


@pytest.mark.parametrize("model_type", ["llama4_text", "minimax_m2"])
def test_other_mixtures_are_refused_by_name(model_type: str, small: Small) -> None:
    dense = model_of(model_type)
    problem = f"form experts, which fits no weight of a {model_type} model"
    assert_refused(lambda: experts_alone(small, dense), problem, error=PlanError)


def test_experts_are_chosen_for_vllm_where_it_serves_the_mixture(small: Small) -> None:
    plan = experts_alone(small, model_of("mixtral"), engine="vllm")
    assert plan.recipe.deployment.engine == "vllm"
    assert counts_of(plan)
    dense = model_of("qwen3_next")
    problem = "a qwen3_next, a mixture of experts, for engine vllm"
    assert_refused(lambda: experts_alone(small, dense, engine="vllm"), problem, "mixtral", error=PlanError)


def test_a_changed_count_is_refused(small: Small, tmp_path: Path) -> None:
    dense = model_of("mixtral")
    gac.save(small.compress(experts_alone(small, dense), model=dense), tmp_path / "saved")
    config = (tmp_path / "saved" / "config.json").read_text()
    (tmp_path / "saved" / "config.json").write_text(config.replace('"experts": ', '"experts": 9'))
    with pytest.raises((CheckpointError, ValueError)):
        gac.load(tmp_path / "saved")


def test_a_plan_says_how_many_tokens_reach_an_expert(small: Small, tmp_path: Path) -> None:
    plan = experts_alone(small, model_of("mixtral"))
    tokens = plan.measured.expert_tokens
    assert [(each.layer, each.sampled) for each in tokens] == [(0, 256), (1, 256), (2, 256)]
    assert all(0 <= each.least <= each.median <= 256 for each in tokens)
    least = min(tokens, key=lambda each: each.least)
    assert f"of 256 tokens {least.least} or more reach each expert (layer {least.layer})" in plan.summary()
    plan.save(tmp_path / "plan.json")
    assert gac.Plan.load(tmp_path / "plan.json") == plan
    gac.report(plan, tmp_path / "plan.html")
    assert "The latency table holds no routed experts." in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_the_plan_of_a_streamed_model_is_the_same(
    model_type: str, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    plan = experts_alone(small, model_of(model_type))
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "own"))
    assert counts_of(experts_alone(small, streamed(model_of(model_type), "cpu"))) == counts_of(plan)
