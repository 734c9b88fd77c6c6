"""Plans of tokens: the choice and its proof, lengths at run time, files, and attention over cut caches."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

import gac
from gac.core.errors import BudgetError, GacError, ModelError, PlanError
from gac.models.attentions import Heads
from gac.plan.plan import WorkloadLatency
from gac_extensions.tokens.attending import Prefill, attending
from gac_extensions.tokens.decide import decide
from gac_extensions.tokens.plan import SCHEMA, TokenPlan
from gac_extensions.tokens.presses import kvpress
from tests.models.small import small_config, small_model

BUDGETS = [8, 16, 24, 32, 40, 48, 56, 64]


def plan_of(losses: Any, limit: int, **changed: Any) -> TokenPlan:
    """A plan for contexts of 64 tokens in steps of 8."""
    losses = np.asarray(losses, dtype=float)
    named = dict.fromkeys(("gac_version", "model", "digest", "press", "text", "text_digest"), "tiny")
    fixed = {"windows": 1, "context": 64, "following": 8, "step": 8, "keep": 0.5, "family": "llama", "options": {}}
    certificate, layers = decide(range(len(losses)), BUDGETS, losses, limit)
    decided = {"certificate": certificate, "layers": layers, "limit": limit, "heads": Heads(4, 2, 32)}
    return TokenPlan(**({"schema_version": SCHEMA} | named | fixed | decided | changed))


def curves(layers: int) -> Any:
    """Convex, and steeper from layer to layer."""
    evicted = 1 - np.array(BUDGETS) / 64
    return np.outer(np.arange(1, layers + 1), evicted**2)


def test_choice_is_the_best_of_all() -> None:
    losses = np.random.default_rng(0).uniform(size=(4, 8))
    plan = plan_of(losses, 4 * 24)
    least = min(
        sum(losses[layer, item] for layer, item in enumerate(items))
        for items in product(range(8), repeat=4)
        if sum(BUDGETS[item] for item in items) <= 4 * 24
    )
    assert plan.loss == pytest.approx(least, abs=1e-12)
    assert plan.certificate.status == "optimal"
    assert plan.certificate.value == plan.certificate.lower_bound == pytest.approx(plan.loss)
    assert plan.used <= plan.limit == 96


def test_convex_curves_use_the_whole_limit() -> None:
    plan = plan_of(curves(4), 4 * 32)
    kept = [layer.kept for layer in plan.layers]
    assert (plan.used, plan.total, kept) == (128, 256, sorted(kept))
    assert kept[0] < kept[-1]
    assert {layer.kept for layer in plan_of([curves(1)[0]] * 6, 6 * 40).layers} == {40}
    with pytest.raises(BudgetError, match=r"the limit of tokens kept in all layers.*24"):
        plan_of(curves(3), 3 * 8 - 1)


def test_budgets_hold_at_every_length() -> None:
    plan = plan_of(curves(4), 4 * 32)
    for tokens in (64, 100, 333, 4096, 131_072):
        kept = [plan.kept(layer.layer, tokens) for layer in plan.layers]
        assert sum(kept) <= plan.used * tokens // plan.context
        assert all(count % plan.step == 0 or count == tokens for count in kept)
    assert [plan.kept(layer.layer, 64) for layer in plan.layers] == [layer.kept for layer in plan.layers]
    full = plan_of(curves(4), 4 * 64, whole=(4,))
    assert {full.kept(layer, 777) for layer in range(5)} == {777}
    short = plan_of(curves(1), 8)
    assert short.kept(0, 8) == 1
    with pytest.raises(GacError, match="a context of 7 tokens, of which layer 0 keeps none; expected 8 or more"):
        short.kept(0, 7)


def test_plan_survives_a_file(tmp_path: Path) -> None:
    plan = plan_of(curves(3), 3 * 24, options={"window_size": 8, "use_vnorm": True, "epsilon": 0.0}, whole=(3,))
    plan.save(tmp_path / "tokens.json")
    assert gac.TokenPlan.load(tmp_path / "tokens.json") == plan


PLAN = plan_of(curves(3), 72)


def numbered(*numbers: int) -> dict[str, Any]:
    """The layers of ``PLAN`` with other numbers."""
    return {"layers": tuple(map(lambda layer, number: replace(layer, layer=number), PLAN.layers, numbers))}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"limit": 10}, "a plan that keeps 72 tokens; expected at most its limit of 10"),
        ({"step": 5}, "layer 0 keeps"),
        ({"schema_version": 9}, "schema version 9"),
        ({"layers": ()}, "has layers"),
        ({"whole": (0,), "window": 8}, "has layers"),
        (numbered(0, 1, 99), "has layers"),
        (numbered(0, 2, 1), "has layers"),
        (numbered(0, 1, 1), "has layers"),
        (
            {"layers": (PLAN.layers[0], *(replace(layer, priced=layer.priced[::-1]) for layer in PLAN.layers[1:]))},
            "priced",
        ),
        ({"context": 0}, "has context, step and windows"),
        ({"heads": Heads(4, 0, 32)}, "has heads"),
        ({"window": 8}, "has window"),
        ({"whole": (3,), "window": 0}, "has window of tokens"),
        ({"latency": {"decode:1@64": 0.5}}, "has multipliers"),
        ({"workloads": (WorkloadLatency("prefill:1x64", 1, 1, 3, 0, 0),)}, "has workloads"),
        ({"workloads": (WorkloadLatency("decode:1@64", 0, 1, 3, 0, 0),)}, "has latencies"),
    ],
)
def test_contradicting_plans_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **changed)


@pytest.mark.parametrize(
    ("kind", "field", "name"),
    [
        (gac.Plan, "press", "a plan of tokens kept"),
        (gac.Plan, "points", "a frontier; expected a plan written by Plan.save. Save a plan of it: gac.Frontier"),
        (gac.Plan, "turns", "a bench of an engine"),
        (gac.TokenPlan, "prediction", "a plan of weights"),
    ],
)
def test_records_of_another_kind_are_named(kind: Any, field: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(f'{{"{field}": {{}}}}')
    with pytest.raises(PlanError, match=f"plan.json, which is {name}"):
        kind.load(tmp_path / "plan.json")


def test_missing_kvpress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kvpress", None)
    with pytest.raises(GacError, match=r"pip install --no-deps kvpress==0.5.5"):
        kvpress()


def keep_last(kept: Mapping[int, int]) -> Any:
    """Keeps the last cached tokens: this number of each layer."""

    def evict(prefill: Prefill) -> None:
        cache, last = prefill.cache, kept[prefill.layer]
        assert prefill.hidden.shape[1] == cache.keys.shape[2]
        cache.keys, cache.values = cache.keys[:, :, -last:], cache.values[:, :, -last:]

    return evict


@pytest.mark.parametrize(("kept", "attention"), [((5, 20), "sdpa"), ((20, 5), "eager"), ((20, 20), "sdpa")])
def test_tokens_in_one_pass_are_as_in_many(tiny_model: LlamaForCausalLM, kept: tuple[int, int], attention: str) -> None:
    tiny_model.set_attn_implementation(attention)
    ids, positions = torch.randint(0, 256, (1, 26)), torch.arange(26)[None]

    def run(parts: list[slice]) -> Tensor:
        cache = DynamicCache()
        with torch.inference_mode(), attending(tiny_model, (0, 1), keep_last(dict(enumerate(kept)))):
            tiny_model(input_ids=ids[:, :20], past_key_values=cache)
            each = [
                tiny_model(input_ids=ids[:, part], position_ids=positions[:, part], past_key_values=cache).logits
                for part in parts
            ]
        assert [layer.keys.shape[2] for layer in cache.layers] == [count + 6 for count in kept]
        return torch.cat(each, 1)

    batched, single = run([slice(20, 26)]), run([slice(token, token + 1) for token in range(20, 26)])
    assert torch.allclose(batched, single, atol=1e-5)
    if kept == (20, 20):
        assert torch.allclose(batched, tiny_model(input_ids=ids).logits[:, 20:], atol=1e-5)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny_model.modules())
    assert not any(hasattr(layer.self_attn, "rotary_emb") for layer in tiny_model.model.layers)


def test_an_unsupported_architecture() -> None:
    model = small_model(small_config("gpt2"))
    with pytest.raises(ModelError, match="in which kvpress finds no attention"), attending(model, (0,), None):
        pass
