"""Models of every form, with inputs shared or not: one graph, no recompiling, every cache, nothing kept."""

from typing import Any

import pytest
import torch
from transformers import StaticCache

from gac.runtime.fusion.shared_gemm import FusedInput
from tests.compression.applying import IDS, logits
from tests.compression.compressed import MakePlan, compressed
from tests.models.small import small_config, small_model
from tests.runtime.interpreted import Graphs

pytestmark = pytest.mark.usefixtures("nothing_compiled")
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
CHANGES: dict[str, dict[str, tuple[str, int]]] = {
    "low_rank": {f"{ATTENTION}.q_proj": ("low_rank", 16), f"{ATTENTION}.v_proj": ("low_rank", 8)}
    | {f"{MLP}.{name}": ("low_rank", 32) for name in ("gate_proj", "up_proj", "down_proj")},
    "head_dim": {f"{ATTENTION}.{name}": ("head_dim", 8) for name in ("v_proj", "o_proj")},
    "latent": {f"{ATTENTION}.k_proj": ("latent:1:int8", 8), f"{ATTENTION}.v_proj": ("latent:1", 8)},
}
STEPS = 6


@pytest.fixture(params=[("low_rank", True), ("head_dim", False), ("latent", True)], ids=str)
def model(request: pytest.FixtureRequest, make_plan: MakePlan) -> Any:
    form, fused = request.param
    return compressed(small_model(small_config("llama", num_hidden_layers=1)), make_plan, CHANGES[form], fused)


def decoded(model: Any, run: Any, cache: Any) -> torch.Tensor:
    """Logits of a prompt of 4 tokens and then one token at a time, shape ``(batch, 4 + STEPS, vocabulary)``."""
    found = [model(IDS[:, :4], past_key_values=cache, use_cache=True).logits]
    for at in range(4, 4 + STEPS):
        position = torch.tensor([[at]])
        found.append(run(IDS[:, at : at + 1], past_key_values=cache, use_cache=True, position_ids=position).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("model", [("low_rank", True)], indirect=True, ids=str)
def test_the_whole_model_is_one_graph(model: Any) -> None:
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            assert (compiled(IDS, use_cache=False).logits - logits(model)).abs().max() < 1e-5
    assert len(graphs) == 1
    shared = (module for module in model.modules() if isinstance(module, FusedInput))
    assert all(module.read is None and module.output is None for module in shared)


def test_steps_with_a_static_cache_are_one_graph(model: Any) -> None:
    graphs, cache = Graphs(), StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        found = decoded(model, torch.compile(model, backend=graphs, fullgraph=True), cache)
    assert (found - logits(model)[:, : 4 + STEPS]).abs().max() < 1e-5
    assert len(graphs) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_can_be_captured_in_a_cuda_graph(model: Any) -> None:
    model, ids = model.cuda(), IDS.cuda()
    with torch.no_grad():
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            model(ids, use_cache=False)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = model(ids, use_cache=False).logits
        ids.add_(1)
        graph.replay()
        assert (found - model(ids, use_cache=False).logits).abs().max() < 1e-4
