"""Presses of kvpress by budgets: what is measured, what is evicted, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import DynamicCache, LlamaForCausalLM

import gac
from gac.cli import main
from gac.core.errors import BudgetError, GacError, ModelError, ProfileError
from gac.evaluation.perplexity import window_divergences
from gac.measurement.texts import Texts
from gac.models.attentions import heads_of
from gac.plan.plan import WorkloadLatency
from gac.profiling.records import Point
from gac_extensions.tokens.presses import known_presses, press_of
from tests.allocation.test_latencies import table
from tests.models.small import small_config, small_model
from tests.small_pipeline import Small

kvpress = pytest.importorskip("kvpress", exc_type=ImportError)


def planned(small: Small, keep: float = 0.5, model: Any = None, **changed: Any) -> gac.TokenPlan:
    """Contexts of 64 tokens, priced at every eighth."""
    options = {"press": "knorm", "calibration": f"{small.text}:2x80", "following": 16, "step": 8} | changed
    model = small.model if model is None else model
    return gac.allocate_tokens(model, keep, tokenizer=small.tokenizer, progress=False, **options)


def cached(model: Any, press: Any, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()
    with torch.inference_mode(), press(model):
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


def lengths(cache: DynamicCache) -> list[int]:
    return [layer.keys.shape[2] for layer in cache.layers]


def test_plan_of_the_dense_model_with_its_compressed_checkpoint(small: Small, tmp_path: Path) -> None:
    plan = planned(small)
    gac.save(small.compress(small.allocate(0.9)), tmp_path / "small")
    ids = torch.arange(64)[None] % 40
    cache = cached(gac.load(tmp_path / "small"), gac.press(plan), ids)
    assert lengths(cache) == [plan.kept(layer, 64) for layer in range(2)]


def test_known_presses() -> None:
    assert {"snapkv", "expectedattention", "knorm", "tova", "streamingllm"} <= known_presses().keys()
    assert not {"pyramidkv", "adakv", "think", "composed"} & known_presses().keys()
    assert press_of("Expected_Attention")[1] == "expectedattention"
    _, name, options = press_of(kvpress.SnapKVPress(window_size=8))
    assert (name, options) == ("snapkv", {"window_size": 8, "kernel_size": 5})


@pytest.mark.parametrize(
    ("press", "message"),
    [
        ("pyramidkv", "press 'pyramidkv', which decides by itself how many tokens a layer keeps; expected one of "),
        ("adakv", "press 'adakv', which has no scores by which the best tokens of a layer are kept; expected one of "),
        ("snapvk", "press 'snapvk' is unknown.*Did you mean 'snapkv'"),
        (kvpress.PyramidKVPress(), "a PyramidKVPress, which decides by itself"),
    ],
)
def test_presses_without_ratios_by_layer(press: Any, message: str) -> None:
    with pytest.raises(GacError, match=message):
        press_of(press)


@pytest.mark.parametrize("press", ["knorm", "expectedattention", kvpress.SnapKVPress(window_size=8)])
def test_evicted_tokens_are_those_of_the_plan(small: Small, press: Any) -> None:
    plan = planned(small, 0.4, press=press)
    assert (plan.limit, plan.used) == (51, 48)  # in steps of 8
    assert [tokens for tokens, _ in planned(small, shares=(0.3, 0.9, 1)).layers[0].priced] == [16, 56, 64]
    composed = gac.press(plan)
    for tokens in (64, 96, 61):
        cache = cached(small.model, composed, torch.randint(0, 256, (2, tokens)))
        assert lengths(cache) == [layer.values.shape[2] for layer in cache.layers]
        assert lengths(cache) == [plan.kept(layer, tokens) for layer in range(2)]
    assert composed.compression_ratio == 1 - 48 / 128
    full = planned(small, 1.0, press=press)
    assert (full.loss, full.used, full.certificate.status) == (0.0, 128, "optimal")
    assert lengths(cached(small.model, gac.press(full), torch.randint(0, 256, (1, 40)))) == [40, 40]


def test_kept_tokens_have_the_best_scores(small: Small) -> None:
    plan = planned(small, 0.75, shares=(0.75,))
    ids = torch.randint(0, 256, (1, 64))
    full = DynamicCache()
    with torch.inference_mode():
        small.model(input_ids=ids, past_key_values=full)
    for cut, dense in zip(cached(small.model, gac.press(plan), ids).layers, full.layers, strict=True):
        best = (-dense.keys.norm(dim=-1)).topk(48).indices
        for head in range(2):
            assert torch.equal(cut.keys[0, head], dense.keys[0, head, best[0, head]])
            assert torch.equal(cut.values[0, head], dense.values[0, head, best[0, head]])


def test_loss_is_the_divergence_with_one_layer_cut(small: Small) -> None:
    plan = planned(small, shares=(0.5,))
    windows = Texts.of(f"{small.text}:2x80").cut(small.tokenizer).ids
    priced = [dict(layer.priced) for layer in plan.layers]
    for layer in range(2):
        layers = tuple(replace(other, kept=32 if other.layer == layer else 64) for other in plan.layers)
        alone = replace(plan, limit=96, layers=layers)
        loss = 0.0
        for ids in windows:
            cache = DynamicCache()
            with torch.inference_mode(), gac.press(alone)(small.model):
                small.model(input_ids=ids[None, :64], past_key_values=cache, use_cache=True)
                cut = small.model(input_ids=ids[None, 64:], past_key_values=cache).logits
            with torch.inference_mode():
                dense = small.model(input_ids=ids[None], use_cache=False).logits[:, 64:]
            loss += float(window_divergences(cut, dense)) / 16
        assert priced[layer][32] == pytest.approx(loss / 2, rel=1e-3)
        assert priced[layer][64] == 0


def test_resume(small: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GAC_HOME", str(tmp_path))
    first = planned(small)
    windows = sorted(tmp_path.rglob("window-*.safetensors"))
    assert len(windows) == 2
    windows[0].unlink()
    before = windows[1].stat().st_mtime_ns
    assert planned(small) == first
    assert windows[1].stat().st_mtime_ns == before
    monkeypatch.setattr("gac_extensions.tokens.allocate._window_losses", None)
    assert planned(small, 0.75).layers != first.layers


def test_sliding_window_layers(small: Small) -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = small_model(small_config("gemma3_text", layer_types=kinds, sliding_window=32))
    plan = planned(small, 0.5, model)
    assert (plan.whole, [layer.layer for layer in plan.layers], plan.limit) == ((0,), [1], 32)
    cache = cached(model, gac.press(plan), torch.randint(0, 256, (1, 64)))
    assert lengths(cache) == [64, plan.layers[0].kept]
    kinds = ["sliding_attention"] * 2
    model = small_model(small_config("gemma3_text", layer_types=kinds, sliding_window=32))
    with pytest.raises(ModelError, match="whose layers all attend within a sliding window"):
        planned(small, 0.5, model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"calibration": "TEXT:1x600"}, ModelError, r"of 600 tokens for a model of 512 positions.*at most 512"),
        ({"workloads": ["decode:1@600"]}, ModelError, r"contexts to decode after of 600 tokens.*at most 512"),
        ({"workloads": ["decode:1@7"]}, GacError, "a context of 7 tokens, of which none is kept; expected 8 or more"),
        ({"shares": (0.1,)}, BudgetError, r"which leaves no token; expected 0.125 or more"),
        ({"keep": 0.01}, BudgetError, r"64 tokens in each of 2 layers; expected 0.1250"),
        ({"keep": 0.0}, BudgetError, "a kept fraction of 0"),
        ({"shares": (float("nan"),)}, BudgetError, "a kept fraction of nan"),
        ({"press": "snapkv"}, GacError, "SnapKVPress fails on 64 tokens of layer 0"),
        ({"latency": 2.0}, BudgetError, "a latency fraction of 2"),
        ({"latency": 0.5, "profile": "nvidia-h100-80gb-hbm3"}, ProfileError, "lacks attention over the whole cache"),
    ],
)
def test_invalid_options(options: dict[str, Any], error: Any, message: str, small: Small) -> None:
    if "calibration" in options:
        options = {"calibration": options["calibration"].replace("TEXT", str(small.text))}
    with pytest.raises(error, match=message):
        planned(small, **options)


def test_latency_limit(small: Small) -> None:
    heads = heads_of(small.model.config)
    known = table([Point(heads.over(1, tokens)) for tokens in range(8, 65, 8)])
    free = planned(small, 1.0, profile=known)
    assert free.workloads == (WorkloadLatency("decode:1@64", *[free.workloads[0].dense_ns] * 2, 2, 0, 0),)
    plan = planned(small, 1.0, profile=known, latency=0.95)
    (run,) = plan.workloads
    assert run.plan_ns is not None
    assert run.plan_ns <= 0.95 * (run.dense_ns or 0)
    assert plan.used < free.used
    assert plan.profile is not None


def test_command_writes_the_plan_of_the_function(
    small: Small, directory: Path, tmp_path: Path, tiny_model: LlamaForCausalLM
) -> None:
    path = tmp_path / "tokens.json"
    options = ["--press", "knorm", "--calibration", f"{small.text}:2x80", "--following", "16", "--step", "8"]
    done = CliRunner().invoke(main, ["tokens", str(directory), "--keep", "0.5", *options, "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert "64 of 128 tokens (0.5000), limit 64" in done.output
    words = " ".join(done.output.split())
    assert "8.2 kB of 16.4 kB cached of 64 tokens, in 16 bits (0.5000)" in words
    assert "decode:1@64: unknown, the table lacks attention over what 2 layers keep" in words
    layers = gac.TokenPlan.load(path).layers
    assert layers == planned(small).layers
    cache = cached(tiny_model, gac.press(path), torch.ones(1, 64).long())
    assert lengths(cache) == [layer.kept for layer in layers]
