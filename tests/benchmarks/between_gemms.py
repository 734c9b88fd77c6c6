"""Kernels between the GEMMs of a layer of Llama-3-8B: those of vLLM beside GAC's, microseconds in CUDA graphs.

    python tests/benchmarks/between_gemms.py --output between-gemms.json

Norms, rotary embeddings, writes to a paged KV cache and gated activations, of 1 to 8,192 tokens in bfloat16. Both give
the same numbers, but for the order of sums and the last bit; else it stops. Needs vLLM.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gac.runtime.contract import FEW_ROWS
from gac.runtime.kernels.elementwise.engine import add_norm, apply_rotary, gate, write_to_pages
from tests.benchmarks.few_rows import microseconds
from tests.benchmarks.harness import options, write

TOKENS = (1, 16, 64, 1024, 8192)
HEADS, KV_HEADS, SIZE, NEURONS, PAGE = 32, 8, 128, (14336, 9216), 16
COPIES = 4
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def rotary(tokens: int) -> Pair:
    from vllm import _custom_ops as ops

    parts = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
    q, k, _ = random(tokens, sum(parts)).split(parts, dim=1)
    positions, angles = torch.arange(tokens, device="cuda") % 1024, random(2048, SIZE)
    early = tokens <= FEW_ROWS
    pairs = [(q.clone(), k.clone()) for _ in range(2)]
    ops.rotary_embedding(positions, *pairs[0], SIZE, angles, True)
    apply_rotary(positions, *pairs[1], angles, SIZE, early)
    for engine, gac in zip(*pairs, strict=True):
        torch.testing.assert_close(gac, engine, rtol=2**-7, atol=2**-7)
    return (
        lambda: ops.rotary_embedding(positions, q, k, SIZE, angles, True),
        lambda: apply_rotary(positions, q, k, angles, SIZE, early),
    )


def cache(tokens: int) -> Pair:
    from vllm import _custom_ops as ops

    k, v = (half.view(tokens, KV_HEADS, SIZE) for half in random(tokens, 2 * KV_HEADS * SIZE).chunk(2, dim=1))
    pages = random(2 * tokens // PAGE + 1, KV_HEADS, PAGE, 2 * SIZE)
    slots, one = torch.randperm(len(pages) * PAGE, device="cuda")[:tokens], torch.ones((), device="cuda")
    pair = [pages.clone() for _ in range(2)]
    views = [[*each.transpose(1, 2).chunk(2, dim=-1)] for each in (*pair, pages)]
    early = tokens <= FEW_ROWS
    ops.reshape_and_cache_flash(k, v, *views[0], slots, "auto", one, one)
    write_to_pages(k, v, *views[1], slots, early)
    assert torch.equal(*pair), "caches differ"
    return (
        lambda: ops.reshape_and_cache_flash(k, v, *views[2], slots, "auto", one, one),
        lambda: write_to_pages(k, v, *views[2], slots, early),
    )


def activation(tokens: int, neurons: int) -> Pair:
    both, out, other = random(tokens, 2 * neurons), random(tokens, neurons), random(tokens, neurons)
    early = tokens <= FEW_ROWS
    torch.ops._C.silu_and_mul(out, both)
    gate(both, other, early)
    torch.testing.assert_close(other, out, rtol=2**-7, atol=1e-6)
    return lambda: torch.ops._C.silu_and_mul(out, both), lambda: gate(both, out, early)


def norm(tokens: int) -> Pair:
    x, residual, weight = random(tokens, HEADS * SIZE), random(tokens, HEADS * SIZE), random(HEADS * SIZE)
    early = tokens <= FEW_ROWS
    pairs = [(x.clone(), residual.clone()) for _ in range(2)]
    torch.ops._C.fused_add_rms_norm(*pairs[0], weight, 1e-5)
    add_norm(*pairs[1], weight, 1e-5, early)
    assert torch.equal(pairs[0][1], pairs[1][1]), "residual streams differ"
    torch.testing.assert_close(*(pair[0] for pair in pairs), rtol=2**-7, atol=1e-6)
    return (
        lambda: torch.ops._C.fused_add_rms_norm(x, residual, weight, 1e-5),
        lambda: add_norm(x, residual, weight, 1e-5, early),
    )


def main() -> None:
    output = options(__doc__, "--output").parse_args().output
    import vllm._custom_ops  # noqa: F401  # registers vLLM's kernels

    kernels: dict[str, Callable[[int], Pair]] = {"norm": norm, "rotary": rotary, "cache": cache}
    kernels |= {f"gated {size}": lambda tokens, size=size: activation(tokens, size) for size in NEURONS}  # type: ignore[misc]
    results: dict[str, Any] = {}
    for name, make in kernels.items():
        for tokens in TOKENS:
            engine, gac = zip(*(make(tokens) for _ in range(COPIES)), strict=True)
            repeats = max(1, 256 // tokens)
            cell = {"vllm": microseconds(engine * repeats), "gac": microseconds(gac * repeats)}
            results.setdefault(name, {})[tokens] = cell
            print(
                f"{name} {tokens}: {cell['vllm']:.2f} / {cell['gac']:.2f} ({cell['vllm'] / cell['gac']:.2f}x)",
                flush=True,
            )
    write(output, microseconds=results)


if __name__ == "__main__":
    main()
