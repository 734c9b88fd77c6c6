"""A GEMM of many rows with the gated activation in it, on Hopper GPUs: as fast as cuBLAS is without.

A program takes one tile after another. The tile of gate and that of up come to shared memory as one operand, so that
both are the result of the same instructions, and only ``silu(gate) * up`` goes back to memory.
"""

from torch import Tensor

from gac.runtime.kernels import gpu
from gac.runtime.kernels.few_rows import ALIGNED, gated_product, runs_early
from gac.runtime.kernels.gpu import ceil_div, launching_on
from gac.runtime.kernels.guard import jit, tl

_BLOCK_M, _BLOCK_N, _BLOCK_K, _STAGES, _WARPS, _GROUP = 128, 128, 64, 3, 8, 8
_FEWEST = 1 << 35
"""Products from which the GEMM takes the GPU longer than its launch takes the CPU."""


def gates_many(x: Tensor, weight: Tensor) -> bool:
    """Return True if ``gated_gemm`` is the fastest for this input ``(tokens, in)`` on this GPU."""
    if not (x.shape[0] * weight.numel() >= _FEWEST and runs_early(x)):
        return False
    return len(weight) // 2 % ALIGNED == 0 and weight.shape[1] % ALIGNED == 0 and x.is_contiguous()


def gated_gemm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write ``silu(gate) * up`` to ``out``, where gate and up are the halves of ``x @ weight.T``, in 16 bits.

    Args:
        x: shape ``(rows, in)``, contiguous.
        weight: shape ``(2 n, in)``, contiguous.
        out: shape ``(rows, n)``, contiguous.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, columns), n = x.shape, out.shape[1]
    tiles = ceil_div(rows, _BLOCK_M) * ceil_div(n, _BLOCK_N)
    programs = min(tiles, gpu.processors(x.device)) if x.is_cuda else 2
    with launching_on(x):
        gated_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [_BLOCK_M, _BLOCK_K]),
            TensorDescriptor.from_tensor(weight.view(2, n, columns), [2, _BLOCK_N, _BLOCK_K]),
            TensorDescriptor.from_tensor(out, [_BLOCK_M, _BLOCK_N]),
            rows, n, columns, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, GROUP=_GROUP, PROGRAMS=programs,
            NUM_STAGES=_STAGES, num_warps=_WARPS,
        )  # fmt: skip


@jit(do_not_specialize=["m"])
def gated_kernel(
    x, weight, out, m, n, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of GROUP blocks of rows come one after the other, so that they find each other's operands in L2."""
    blocks_m, blocks_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, PROGRAMS, flatten=True):
        first = tile // (GROUP * blocks_n) * GROUP
        size = tl.minimum(blocks_m - first, GROUP)
        row = (first + tile % (GROUP * blocks_n) % size) * BLOCK_M
        column = tile % (GROUP * blocks_n) // size * BLOCK_N
        both = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for start in tl.range(0, n_cols, BLOCK_K, num_stages=NUM_STAGES):
            weights = weight.load([0, column, start]).reshape(2 * BLOCK_N, BLOCK_K)
            both = tl.dot(x.load([row, start]), weights.T, both)
        narrow = out.dtype
        gate, up = both.to(narrow).reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        out.store([row, column], gated_product(gate.to(tl.float32), up.to(tl.float32), narrow))
