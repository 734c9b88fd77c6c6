"""Norms, gated products and rotary embeddings in one launch each: outputs stay the same, bit for bit."""

import copy
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache
from transformers.models.llama import modeling_llama

from gac.runtime.fusion import elementwise as replaced
from gac.runtime.fusion.elementwise import fuse_elementwise
from gac.runtime.kernels.elementwise.rows import ACTIVATIONS, NORMS, plainly_rotated
from tests.compression.applying import IDS, logits
from tests.compression.stored import stored
from tests.models.small import every_layout, small_config, small_model
from tests.runtime.interpreted import DEVICE, operators

Ran = Counter[str]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """How often each kernel has run, in plain PyTorch, on a CPU that passes for a GPU."""
    if DEVICE == "cuda":
        pytest.skip("a GPU has its own kernels")
    found: Ran = Counter()

    def noted(name: str, run: Any) -> Any:
        def counted(*given: Any) -> Any:
            found[name] += 1
            return run(*given)

        return counted

    plain = {
        "normed": lambda x, weight, eps, kind: NORMS[kind](x, weight, eps),
        "gated": lambda gate, up, kind: ACTIVATIONS[kind](gate) * up,
        "rotated_heads": plainly_rotated,
        "write_to_cache": cache_plainly,
    }
    monkeypatch.setattr(replaced, "unsupported_reason", lambda device, dtype: None)
    with operators(**{name: noted(name, run) for name, run in plain.items()}):
        yield found


def cache_plainly(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> None:
    for cached, new in ((keys, k), (values, v)):
        cached[:, :, int(length) : int(length) + new.shape[2]] = new


def narrow(model_type: str) -> Any:
    """A model in 16 bits, its angles in 32."""
    config = small_config(model_type)
    config.dtype = torch.bfloat16
    return small_model(config)


llama = partial(narrow, "llama")


NOT_ROTATED = ("cohere2", "glm", "gpt2", "olmo2", "opt")
"""No rotary embedding; neighbours that are a pair; a part of each head, cut off inside; or rounded elsewhere."""
NORMS_APART = ("cohere2", "gpt2", "olmo2", "opt")
"""LayerNorms, and RMSNorms that round at another step."""
UNGATED = ("gpt2", "opt")


@every_layout
def test_outputs_are_the_same_in_every_architecture(model_type: str, ran: Ran) -> None:
    model = narrow(model_type)
    expected = logits(model)
    ran.clear()
    fuse_elementwise(model)
    assert torch.equal(logits(model), expected)
    assert (ran["normed"] > 0) == (model_type not in NORMS_APART)
    assert ran["gated"] == (0 if model_type in UNGATED else 2)
    assert ran["rotated_heads"] == (0 if model_type in NOT_ROTATED else 2)


def test_gradients_training_hooks_and_copies(ran: Ran) -> None:
    model = llama()
    fuse_elementwise(model)
    model(IDS)  # with gradients
    model.train()
    logits(model)
    assert ran["normed"] == ran["gated"] == 0
    model.eval()
    seen: list[Tensor] = []
    hook = model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(output))
    found = logits(model)
    assert len(seen) == 1
    assert (ran["normed"], ran["gated"]) == (5, 1)
    hook.remove()
    other = copy.deepcopy(model)
    nn.init.zeros_(model.model.norm.weight)
    assert torch.equal(logits(other), found)
    assert not torch.equal(logits(model), found)


def test_a_static_cache_is_written_in_one_launch(ran: Ran) -> None:
    model, options = llama(), {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    expected = model.generate(IDS, **options)
    fuse_elementwise(model)
    assert torch.equal(model.generate(IDS, **options), expected)
    assert ran["write_to_cache"] == 0
    cache = StaticCache(config=model.config, max_cache_len=IDS.shape[1] + 4)
    assert torch.equal(model.generate(IDS, past_key_values=cache, disable_compile=True, **options), expected)
    assert ran["write_to_cache"] == 2 * 3  # the prompt's tokens lay out the cache
    assert int(cache.layers[0].cumulative_length) == IDS.shape[1] + 3


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_code_has_the_plain_steps(ran: Ran) -> None:
    model = llama()
    expected = logits(model)
    fuse_elementwise(model)
    ran.clear()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(IDS, use_cache=False).logits, expected)
    assert not ran


def test_the_function_of_a_file_rotates_in_other_models_as_before(ran: Ran) -> None:
    other = llama()
    for _ in range(2):
        fuse_elementwise(llama())
    logits(other)
    assert not ran
    q, k, angles = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 8)
    function = modeling_llama.apply_rotary_pos_emb
    with torch.no_grad():
        expected = plainly_rotated(q, k, angles, angles)
        assert all(map(torch.equal, function(q, k, angles, angles), expected))
        found = function(q.transpose(1, 2), k.transpose(1, 2), angles, angles, unsqueeze_dim=2)
    assert all(torch.equal(one.transpose(1, 2), other) for one, other in zip(found, expected, strict=True))
    assert not hasattr(function.__wrapped__, "with_fused_updates")  # it is replaced once


def test_a_compressed_model_runs_so(make_plan: Any, ran: Ran) -> None:
    model = stored(llama(), make_plan, {"model.layers.0.self_attn.q_proj": ("low_rank", 8, "bf16")})
    logits(model)
    assert (ran["normed"], ran["gated"], ran["rotated_heads"]) == (5, 2, 2)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3"])
def test_a_gpu_does_the_same_captured(model_type: str) -> None:
    model = narrow(model_type).cuda()
    ids = torch.arange(7, device="cuda")[None]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits.float()
        fuse_elementwise(model)
        found = model(ids, use_cache=False).logits
        assert float((found.float() - expected).norm() / expected.norm()) < 1e-2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(ids, use_cache=False).logits
        graph.replay()
        assert torch.equal(captured, found)
