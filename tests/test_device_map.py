"""Models that accelerate has spread over devices; a CPU and a disk stand in for several GPUs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gac
from gac.core.errors import ModelError
from gac.models.digests import model_digest, read_parameter
from tests.compression.applying import logits
from tests.small_pipeline import Small

accelerate = pytest.importorskip("accelerate")


def dispatched(model: LlamaForCausalLM, second_layer: str, folder: Path) -> LlamaForCausalLM:
    """A copy whose second layer is where ``second_layer`` says, the rest on the CPU."""
    parts = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    device_map = dict.fromkeys(parts, "cpu") | {"model.layers.1": second_layer}
    options = {"main_device": "cpu", "offload_dir": folder, "force_hooks": True}
    return accelerate.dispatch_model(copy.deepcopy(model), device_map, **options)


UNLIMITED: dict[str, Any] = {"latency": "any", "slack": 0}
PEERS = UNLIMITED | {"method": "svd-llm", "rule": "zero-sum", "forms": ("low_rank",)}


@pytest.mark.parametrize(
    ("where", "given"), [("disk", UNLIMITED), ("cpu", UNLIMITED | {"shots": 2}), ("cpu", PEERS)], ids=str
)
def test_the_plan_is_the_same(small: Small, where: str, given: Any, tmp_path: Path, monkeypatch: Any) -> None:
    plan = small.allocate(0.7, **given)
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "own"))
    spread = dispatched(small.model, where, tmp_path / "offloaded")
    assert small.allocate(0.7, model=spread, **given) == plan
    assert small.allocate(0.7, model=spread, **given) == plan  # from what was kept


def test_a_dispatched_model_is_compressed_where_it_is(small: Small, tmp_path: Path) -> None:
    plan = small.allocate(0.7)
    ours = small.compress(plan, model=dispatched(small.model, "cpu", tmp_path))
    assert torch.equal(logits(ours), logits(small.compress(plan)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "where its smaller one can take its place"),
        ({"shots": 2}, "with shots=2; .* where the first shot is made of it"),
        (PEERS, "under the rule zero-sum; .* where its gradient or its truncation can be measured"),
    ],
)
def test_offloaded_weights_have_no_successor(small: Small, given: Any, message: str, tmp_path: Path) -> None:
    spread = dispatched(small.model, "disk", tmp_path)
    plan = None if given else small.allocate(0.7)
    with pytest.raises(ModelError, match=f"q_proj.weight is offloaded by its device_map.*{message}"):
        small.allocate(0.7, model=spread, **given) if plan is None else small.compress(plan, model=spread)


def test_tied_weights_count_once_and_meta_is_refused(tiny_config: LlamaConfig, tmp_path: Path, small: Small) -> None:
    tiny_config.tie_word_embeddings = True
    model = LlamaForCausalLM(tiny_config)
    digest = model_digest(model, [])
    parts = ("model.rotary_emb", "model.layers", "model.norm")
    device_map = dict.fromkeys(parts, "cpu") | dict.fromkeys(("model.embed_tokens", "lm_head"), "disk")
    spread = accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path)
    assert spread.lm_head.weight.is_meta
    assert model_digest(spread, []) == digest
    with pytest.raises(ModelError, match=r"lm_head\.weight is on the meta device"):
        read_parameter(small.model.to("meta"), "lm_head.weight")


@pytest.mark.parametrize("compressed", [False, True])
def test_offloaded_models_are_evaluated_alike(compressed: bool, small: Small, prose: str, tmp_path: Path) -> None:
    model = small.compress(small.allocate(0.7)) if compressed else small.model
    options: dict[str, Any] = {"windows": 2, "length": 32, "progress": False}
    spread = dispatched(model, "disk", tmp_path)
    measured = gac.perplexity(spread, small.tokenizer, prose, **options)
    assert measured == gac.perplexity(model, small.tokenizer, prose, **options)
    assert gac.divergence(spread, model, small.tokenizer, prose, **options).kl == 0
    evaluated = gac.evaluate(spread, tokenizer=small.tokenizer, text=prose, **options)
    assert evaluated.models[0].perplexity == measured
    assert all(parameter.requires_grad and not parameter.is_inference() for parameter in spread.parameters())
