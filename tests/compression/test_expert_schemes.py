"""Routed experts in few bits: counts, widths and schemes of one plan, saved, loaded in three ways, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import gac
from gac.core.errors import PlanError
from gac.plan.choices import WeightChoice
from gac.runtime.storage.modules import stored_modules
from gac.runtime.vllm.check import refusal
from tests.compression.applying import IDS, logits
from tests.compression.test_experts import mixing
from tests.refused import assert_refused
from tests.small_pipeline import Small, has_state, state_of
from tests.without_gac import WithoutGac

MODELS = ("mixtral", "qwen3_moe", "gpt_oss")
MEMORY = {"w4a16:32": 0.2, "fp8": 0.4, "w8a16": 0.4}
FAST = {("mixtral", "w4a16:32"), ("qwen3_moe", "fp8"), ("gpt_oss", "w4a16:32"), ("gpt_oss", "w8a16")}


def in_few_bits(small: Small, model: Any, scheme: str, **changed: Any) -> gac.Plan:
    options = {"forms": ("experts",), "schemes": ("bf16", scheme), "memory": MEMORY.get(scheme, 0.5), "workloads": ()}
    return small.allocate(1.0, model=model, **options | changed)


def stacks_of(plan: gac.Plan) -> list[WeightChoice]:
    return [choice for choice in plan.weights if choice.weight.experts]


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [
        pytest.param(model_type, scheme, marks=[] if (model_type, scheme) in FAST else [pytest.mark.slow])
        for model_type in MODELS
        for scheme in MEMORY
    ],
)
def test_from_a_plan_to_a_checkpoint_and_back(
    model_type: str, scheme: str, small: Small, without_gac: WithoutGac, tmp_path: Path
) -> None:
    dense = mixing(model_type)
    plan = in_few_bits(small, dense, scheme)
    assert {choice.scheme for choice in stacks_of(plan)} >= {scheme}
    assert any(choice.form.startswith("experts") and choice.scheme == scheme for choice in stacks_of(plan))
    routers = [choice for choice in plan.weights if choice.weight.is_routed and not choice.weight.experts]
    assert {choice.scheme for choice in routers} == {"bf16"}
    plan.save(tmp_path / "plan.json")
    assert gac.Plan.load(tmp_path / "plan.json") == plan

    model: Any = small.compress(plan, model=dense)
    for choice in stacks_of(plan):
        stored = stored_modules(model.get_submodule(choice.name))
        if choice.scheme != "bf16":
            assert sum(each.nbytes for stack in stored.values() for each in stack.counted.values()) == choice.bytes
        assert len(stored) == 2 * (choice.scheme != "bf16")

    gac.save(model, tmp_path / "saved")
    assert gac.verify(tmp_path / "saved").tensors == len(model.state_dict())
    loaded: Any = gac.load(tmp_path / "saved", verify=True)
    assert has_state(loaded, state_of(model))
    assert torch.equal(logits(loaded), logits(model))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(IDS, **options), loaded.generate(IDS, use_cache=False, **options))
    without_gac.check(tmp_path / "saved", model)

    said = refusal(loaded.config)
    assert (said is None) == (scheme == "fp8")
    assert said is None or f"has scheme {scheme}, in which vLLM does not run experts" in said[0]


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_the_predicted_loss_is_that_of_the_model(model_type: str, small: Small) -> None:
    dense = mixing(model_type)
    plan = in_few_bits(small, dense, "w2a16:32", refit="none", memory=0.25, calibration=f"{small.text}:16x64")
    ids = torch.tensor(small.tokenizer(small.text.read_text())["input_ids"][-512:]).view(8, 64)
    was = logits(dense, ids).log_softmax(-1)
    now = logits(small.compress(plan, model=dense), ids).log_softmax(-1)
    lost = float((was.exp() * (was - now)).sum(-1).mean())
    assert 0.3 < lost / plan.prediction.loss < 3, (lost, plan.prediction.loss)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_as_many_experts_in_every_layer_are_exported_with_their_values(
    model_type: str, small: Small, tmp_path: Path
) -> None:
    dense = mixing(model_type)
    plan = in_few_bits(small, dense, "w8a16", memory=0.6)
    assert {choice.form for choice in stacks_of(plan)} == {"dense"}
    assert "w8a16" in {choice.scheme for choice in stacks_of(plan)}
    model: Any = small.compress(plan, model=dense)
    gac.export(model, tmp_path / "stock")
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    torch.testing.assert_close(logits(stock), logits(model))


def test_planned_bytes_are_those_of_the_files(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gac.forms.experts.widths", "gac.forms.experts.torch.widths"):
        monkeypatch.setattr(module, lambda _neurons: (32,))  # grouped GEMMs in bfloat16 take multiples of 8
    monkeypatch.setenv("GAC_HOME", str(tmp_path))
    dense = mixing("qwen3_moe").to(torch.bfloat16)
    plan = in_few_bits(small, dense, "fp8", refit="none")
    assert {(choice.form, choice.scheme) for choice in stacks_of(plan)} == {("experts:32", "fp8")}
    gac.save(small.compress(plan, model=dense), tmp_path / "saved")
    verified = gac.verify(tmp_path / "saved")
    assert verified.bytes - verified.shape_bytes == verified.planned_bytes


def test_one_scheme_alone_leaves_routers_in_16_bits(small: Small) -> None:
    plan = in_few_bits(small, mixing("mixtral"), "w8a16", schemes=("w8a16",))
    assert {choice.scheme for choice in stacks_of(plan)} == {"w8a16"}
    assert {choice.scheme for choice in plan.weights if choice.weight.is_routed} == {"w8a16", "bf16"}


def test_prices_of_experts_are_measured_where_linear_weights_had_theirs(small: Small) -> None:
    dense = mixing("mixtral")
    small.allocate(1.0, model=dense, forms=("low_rank",), schemes=("bf16", "w4a16:32"), memory=0.4)
    plan = in_few_bits(small, dense, "w4a16:32", memory=0.3)
    assert all(site.loss > 0 for site in plan.sites if site.kind == "experts" if site.weights[1].scheme != "bf16")


def test_plans_for_vllm_have_experts_in_what_its_kernel_reads(small: Small) -> None:
    dense = mixing("mixtral")
    schemes = ("bf16", "fp8", "w8a16")
    plan = in_few_bits(small, dense, "fp8", schemes=schemes, engine="vllm", refit="none")
    assert plan.recipe.deployment.engine == "vllm"
    assert "fp8" in {choice.scheme for choice in stacks_of(plan)} <= {"bf16", "fp8"}


def test_plans_for_vllm_are_refused_by_name(small: Small) -> None:
    dense = mixing("mixtral")
    assert_refused(
        lambda: in_few_bits(small, dense, "w4a16:32", schemes=("w4a16:32",), engine="vllm"),
        "form experts in scheme w4a16:32 for engine vllm",
        "experts in bf16, fp8",
        error=PlanError,
    )
