"""Kernels between GEMMs in place of vLLM's, on a CPU: ``TRITON_INTERPRET=1 python vllm_kernels.py``, by vLLM's Python.

On a GPU the plugin puts them in place of ``forward_cuda``, and of the writes of FlashAttention. Here the same functions
get vLLM's modules, and its layout of the cache. Prints ``equal`` where they give what vLLM's plain PyTorch does.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope

from gac.runtime.kernels.elementwise import engine
from gac.runtime.storage import eight_bits
from gac.runtime.storage.eight_bits import Floats8
from gac.runtime.vllm import elementwise
from gac.runtime.vllm.operator import number_of
from gac.runtime.vllm.stored import Gemm, StoredLinearMethod

TOKENS, HEADS, KV_HEADS, SIZE, FEATURES = 5, 4, 2, 16, 48


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2**-8, atol=2**-12)


def check_rotary() -> None:
    rotary = get_rope(SIZE, 64, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, dtype=torch.float16)
    q, k, _ = random(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE).split(
        [n * SIZE for n in (HEADS, KV_HEADS, KV_HEADS)], dim=1
    )
    positions = torch.tensor([3, 0, 63, 7, 8])
    expected = rotary.forward_native(positions, q.clone(), k.clone())
    rotated = elementwise._rotated(rotary, positions, q, k)
    assert rotated[0] is q
    for actual, plain in zip(rotated, expected, strict=True):
        close(actual, plain)


def check_cache() -> None:
    """A cache of FlashAttention: ``(blocks, heads, tokens, 2 * size)``."""
    cache, slots = random(3, KV_HEADS, 8, 2 * SIZE), torch.tensor([20, 0, -1, 9])  # the fifth token fills the batch
    expected = cache.clone()
    k, v = (half.view(TOKENS, KV_HEADS, SIZE) for half in random(TOKENS, 2 * KV_HEADS * SIZE).chunk(2, dim=1))
    elementwise._write(SimpleNamespace(head_size=SIZE), None, k, v, cache, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 8, :, slot % 8] = torch.cat((k[token], v[token]), dim=-1)
    assert torch.equal(cache, expected)


def check_norm() -> None:
    norm = RMSNorm(FEATURES, eps=1e-5, dtype=torch.float16)
    norm.weight.data.copy_(random(FEATURES))
    norm.reader = number_of(norm)
    x, residual = random(TOKENS, FEATURES), random(TOKENS + 1, FEATURES)[1:]
    expected = norm.forward_native(x.clone(), residual.clone())
    normed = elementwise._normed(norm, x, residual)
    assert normed[0] is x
    for actual, plain in zip(normed, expected, strict=True):
        close(actual, plain)


def check_prepared() -> None:
    """A norm quantises the input of the layer that reads it, which takes no other."""
    norm, layer = RMSNorm(FEATURES, eps=1e-5, dtype=torch.float16), nn.Module()
    layer.quant_method = method = StoredLinearMethod("layer", [None])
    method._firsts = [gemm := Gemm(layer, "gemm0", Floats8(), [32], FEATURES)]
    numbers, scale = Floats8().quantise(random(32, FEATURES))
    gemm.fill(layer, slice(0, 32), {"weight": numbers, "weight_scale": scale})
    norm.reader = number_of(layer)
    x, residual = random(TOKENS, FEATURES), random(TOKENS + 1, FEATURES)[1:]
    expected, before = norm.forward_native(x.clone(), residual.clone()), (x.clone(), residual.clone())
    with (
        mock.patch.object(Floats8, "unsupported_reason", return_value=None),
        mock.patch.object(eight_bits, "eight_bits_linear_of", plain_product),  # the kernel runs on GPUs alone
    ):
        normed, summed = elementwise._normed(norm, x, residual)
        assert normed.isnan().any()
        close(summed, expected[1])
        product = method._product(gemm, layer, normed, None)
        again = elementwise._add_norm(*before, norm.weight, norm.variance_epsilon, norm.reader)
        close(again[0], expected[0])
        assert torch.equal(product, method._product(gemm, layer, again[0], None))
    plain = method._product(gemm, layer, again[0], None)
    assert torch.equal(plain, gemm.multiply(layer, again[0]))
    assert (product - plain).norm() < 0.1 * plain.norm()  # the interpreter rounds to fewer numbers


def plain_product(numbers: torch.Tensor, row_scale: torch.Tensor, _: Any, *weight: Any) -> torch.Tensor:
    matrix, scale, dtype, block = weight
    assert block is None
    return ((numbers.float() * row_scale) @ (matrix.float() * scale.float()).T).to(dtype)


def check_graphs() -> None:
    """Norms and rotary embeddings within a compiled graph."""
    norm = RMSNorm(FEATURES, eps=1e-5, dtype=torch.float16)
    norm.weight.data.copy_(random(FEATURES))
    rotary = get_rope(SIZE, 64, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, dtype=torch.float16)
    expected = norm.forward_native, rotary.forward_native
    elementwise.use_kernels(nn.ModuleList([norm, rotary]), {})
    x, residual, positions = random(TOKENS, FEATURES), random(TOKENS + 1, FEATURES)[1:], torch.tensor([3, 0, 63, 7, 8])
    k, q = random(TOKENS, (HEADS + KV_HEADS) * SIZE).split([KV_HEADS * SIZE, HEADS * SIZE], dim=1)
    before = [tensor.clone() for tensor in (x, residual, q, k)]
    compiled = torch.compile(lambda: (*norm(x, residual), *rotary(positions, q, k)), backend=counting, fullgraph=True)
    results = compiled()
    assert counted == {"gac_add_norm": 1, "gac_rotary": 1}, counted
    for actual, plain in zip(results, (*expected[0](*before[:2]), *expected[1](positions, *before[2:])), strict=True):
        close(actual, plain)


counted: Counter[str] = Counter()


def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    counted.update(str(node.target).split(".")[1] for node in graph.graph.nodes if "gac_" in str(node.target))
    return graph


def check_gate() -> None:
    x, out = random(TOKENS, 2 * FEATURES), random(TOKENS, FEATURES)
    elementwise.silu_and_mul(x, out)
    close(out, torch.nn.functional.silu(x[:, :FEATURES]) * x[:, FEATURES:])


def main() -> None:
    def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, early: bool) -> None:
        engine.add_norm(x, residual, weight, eps)  # the interpreter cannot launch early

    with (
        set_current_vllm_config(VllmConfig()),
        mock.patch.object(elementwise, "_are_many", return_value=True),
    ):
        check_rotary()
        check_cache()
        check_gate()
        with (
            mock.patch.object(elementwise, "runs_early", return_value=True),
            mock.patch.object(elementwise, "add_norm", add_norm),
        ):
            check_norm()
            check_prepared()
        with (
            mock.patch.object(elementwise, "runs_early", side_effect=lambda x: len(x) != TOKENS),
            mock.patch.object(elementwise, "_is_alone", return_value=True),
        ):
            check_graphs()
    print("equal")


if __name__ == "__main__":
    main()
