"""From a dense model to a smaller one that is saved, opened elsewhere and used."""

import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import gac
from gac.models.loading import Loaded
from gac.plan import Plan

PROMPT = torch.tensor([[1, 504, 3575, 282, 4649]])

_LOGITS = """
import sys, torch, gac
model = gac.load(sys.argv[1])
with torch.inference_mode():
    torch.save(model(torch.tensor([[1, 504, 3575, 282, 4649]])).logits, sys.argv[2])
"""


def logits(model: PreTrainedModel, ids: torch.Tensor = PROMPT) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits
    return found


@pytest.mark.smollm2
def test_smollm2_at_four_fifths(smollm2: Loaded, tmp_path: Path) -> None:
    tokenizer = smollm2.tokenizer
    options = {"profile": "nvidia-h100-80gb-hbm3", "calibration": "wiki-sample:4x256", "tokenizer": tokenizer}
    plan = gac.allocate(smollm2.model, 0.8, **options)
    assert plan.budget.used == sum(weight.params for weight in plan.weights)
    assert plan.budget.used <= plan.budget.limit == plan.budget.total * 8 // 10
    assert plan.aligned_fraction == 1.0

    small = gac.compress(deepcopy(smollm2.model), plan, tokenizer=tokenizer)
    counted = sum(parameter.numel() for parameter in small.parameters())
    assert counted == plan.budget.model - plan.budget.total + plan.budget.used

    gac.save(small, tmp_path / "small", tokenizer=tokenizer)
    code = [sys.executable, "-c", _LOGITS, str(tmp_path / "small"), str(tmp_path / "logits.pt")]
    subprocess.run(code, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(small))

    cached, uncached = (
        small.generate(PROMPT, max_new_tokens=8, do_sample=False, use_cache=use_cache) for use_cache in (True, False)
    )
    assert torch.equal(cached, uncached)
    assert isfinite(gac.perplexity(small, tokenizer, windows=2, length=256).value)


@pytest.fixture
def dense_plan(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path) -> Plan:
    """The plan at a budget of 1: nothing has to go."""
    return gac.allocate(tiny_model, 1.0, calibration=f"{text_file}:4x64", tokenizer=tiny_tokenizer, progress=False)


def test_nothing_is_lost_at_budget_1(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, dense_plan: Plan
) -> None:
    assert {weight.form for weight in dense_plan.weights} == {"dense"}
    before = logits(tiny_model, PROMPT % 256)
    small = gac.compress(tiny_model, dense_plan, tokenizer=tiny_tokenizer, progress=False)
    assert torch.equal(logits(small, PROMPT % 256), before)


def test_nothing_is_lost_at_full_rank(
    tiny_config: LlamaConfig,
    tiny_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    dense_plan: Plan,
    make_plan: Callable[..., Plan],
) -> None:
    full = {w.name: ("low_rank", min(w.out_features, w.in_features)) for w in dense_plan.weights}
    by_hand = make_plan(tiny_config, full)
    plan = replace(by_hand, model_digest=dense_plan.model_digest, calibration=dense_plan.calibration)
    before = logits(tiny_model, PROMPT % 256)
    small = gac.compress(tiny_model, plan, tokenizer=tiny_tokenizer, progress=False)
    assert {type(small.get_submodule(name)).__name__ for name in full} == {"LowRankLinear"}
    torch.testing.assert_close(logits(small, PROMPT % 256), before, rtol=0, atol=1e-4)
