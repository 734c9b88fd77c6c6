"""From a dense model to a smaller one that is saved, opened elsewhere and used."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import gac
from gac.plan import Plan

PROMPT = torch.tensor([[1, 504, 3575, 282, 4649]])


def logits(model: PreTrainedModel, ids: torch.Tensor = PROMPT) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits
    return found


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
    full = {w.name: ("low_rank", min(w.weight.out_features, w.weight.in_features)) for w in dense_plan.weights}
    by_hand = make_plan(tiny_config, full)
    plan = replace(by_hand, measured=dense_plan.measured)
    before = logits(tiny_model, PROMPT % 256)
    small = gac.compress(tiny_model, plan, tokenizer=tiny_tokenizer, progress=False)
    assert {type(small.get_submodule(name)).__name__ for name in full} == {"LowRankLinear"}
    torch.testing.assert_close(logits(small, PROMPT % 256), before, rtol=0, atol=1e-4)
