"""GEMMs in ``w4a16`` and ``fp8_block`` by GAC's kernels, by vLLM's and by cuBLAS, as microseconds in CUDA graphs.

    python tests/benchmarks/engine_kernels.py --output engine-kernels.json

vLLM's ``w4a16`` is symmetric, in Machete's and Marlin's layouts; GAC's has zero points. Inputs of ``fp8_block`` are
quantised already. Needs vLLM beside GAC, and a Hopper GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gac.runtime.kernels.int8_fp8 import eight_bits_linear_of, gemm
from gac.runtime.kernels.low_bit import few_bits_linear
from gac.runtime.kernels.quantise_rows import quantise_rows
from tests.benchmarks.few_rows import microseconds
from tests.benchmarks.harness import markdown, options, write

ROWS = (1, 2, 8, 16, 32, 64, 128, 8192)
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
GROUP, BLOCK, BF16 = 128, 128, torch.bfloat16
READ = 300_000_000  # bytes of weights at least, so that none is in the L2 cache
Launches = Sequence[Callable[[], Any]]


def main() -> None:
    parser = options(__doc__, "--output")
    chosen = parser.parse_args()
    rows = []
    for kernels in (_four_bits, _blocks):
        for n, k in SHAPES:
            for m in ROWS:
                times = {name: microseconds(launches) for name, launches in kernels(m, n, k).items()}
                rows += [(name, f"{n} x {k}", m, f"{time:.1f}") for name, time in times.items()]
                print(*rows[-len(times) :], sep="\n", flush=True)
    print(markdown(["kernel", "weight", "rows", "us"], rows))
    write(chosen.output, rows=rows)


def _four_bits(m: int, n: int, k: int) -> Mapping[str, Launches]:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (
        marlin_make_workspace_new,
        marlin_permute_scales,
    )
    from vllm.scalar_type import scalar_types

    x, count = torch.randn(m, k, device="cuda", dtype=BF16), _count(m, n * k // 2)
    empty, work = torch.empty(0, dtype=torch.int, device="cuda"), marlin_make_workspace_new(torch.device("cuda", 0))
    kind, scales = scalar_types.uint4b8, [torch.rand(k // GROUP, n, device="cuda").to(BF16) for _ in range(count)]
    packed = [(_words(n, k // 8), scale.t().contiguous(), _words(n // 8, k // GROUP)) for scale in scales]
    machete = [ops.machete_prepack_B(_words(n, k // 8).t(), BF16, kind, BF16) for _ in scales]
    marlin = [ops.gptq_marlin_repack(_words(k // 8, n), empty, k, n, 4) for _ in scales]
    permuted = [marlin_permute_scales(scale, k, n, GROUP) for scale in scales]
    mode: tuple[Any, ...] = (empty, empty, work, kind, m, n, k, True, False, True, False)
    return {
        "cuBLAS, bf16": [lambda w=w: x @ w.t() for w in _dense(m, n, k)],
        "GAC, w4a16": [lambda w=w: few_bits_linear(x, *w, 4, GROUP, k) for w in packed],
        "Machete": [
            lambda w=w, s=s: ops.machete_mm(a=x, b_q=w, b_type=kind, b_group_scales=s, b_group_size=GROUP)
            for w, s in zip(machete, scales, strict=True)
        ],
        "Marlin": [
            lambda w=w, s=s: ops.marlin_gemm(x, None, w, None, s, None, None, None, *mode)
            for w, s in zip(marlin, permuted, strict=True)
        ],
    }


def _blocks(m: int, n: int, k: int) -> Mapping[str, Launches]:
    from vllm import _custom_ops as ops

    x = quantise_rows(torch.randn(m, k, device="cuda", dtype=BF16), torch.float8_e4m3fn, BLOCK)
    weights = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(_count(m, n * k))]
    scale = torch.rand(n // BLOCK, k // BLOCK, device="cuda")
    by_column = x.scale.t().contiguous().t()
    return {
        "GAC, fp8_block": [lambda w=w: eight_bits_linear_of(*x, w, scale, BF16, BLOCK) for w in weights],
        "GAC, fp8_block, tiles": [lambda w=w: gemm(x, w, scale, BF16, block=BLOCK) for w in weights],
        "CUTLASS, fp8_block": [
            lambda w=w: ops.cutlass_scaled_mm(x.numbers, w.t(), by_column, scale.t(), BF16) for w in weights
        ],
    }


def _count(rows: int, size: int) -> int:
    """Return the number of weights of so many bytes: few where a product takes long."""
    return 1 if rows > 1024 else max(4, min(32, READ // size))


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")


def _dense(rows: int, n: int, k: int) -> list[Tensor]:
    return [torch.randn(n, k, device="cuda", dtype=BF16) for _ in range(_count(rows, 2 * n * k))]


if __name__ == "__main__":
    main()
