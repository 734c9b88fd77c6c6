"""Products with weights of few bits on a GPU, by the fastest kernels (``tests/benchmarks/results/kernels.md``).

For more than ``MOST_ROWS`` rows a kernel writes the weight in 16 bits, and a GEMM multiplies it. Products and what is
written are operators, so that compiled code and CUDA graphs hold them. Triton is imported when the first of them runs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gac.runtime.kernels.elementwise.rows import AddNorm
from gac.runtime.kernels.gpu import operator
from gac.runtime.kernels.low_bit.dequantise import dequantised
from gac.runtime.kernels.low_bit.few_rows import skinny_gemm
from gac.runtime.kernels.low_bit.one_row import gemv
from gac.runtime.kernels.low_bit.packed import Packed
from gac.runtime.kernels.low_bit.tiles import MOST_ROWS, ArrangedRows, arranged, gemm

_FEW_ROWS = {3: 32}
"""By bits the most rows that are multiplied without tiles."""


@operator(lambda x, words, *_: x.new_empty(*x.shape[:-1], len(words)))
def few_bits_linear(
    x: Tensor, words: Tensor, scale: Tensor, zeros: Tensor | None, bits: int, group: int, columns: int
) -> Tensor:
    """``x @ weight.T`` for x ``(..., columns)`` of 16 bits on a GPU: sums are float32, the result is in x's dtype."""
    weight = Packed(words, scale, zeros, bits, group, columns)
    inputs = x.reshape(-1, columns).contiguous()
    if len(inputs) == 1:
        y = gemv(inputs, weight)
    elif len(inputs) <= _FEW_ROWS.get(bits, 1):
        y = skinny_gemm(inputs, weight)
    elif len(inputs) <= MOST_ROWS:
        y = gemm(inputs, weight)
    else:
        y = functional.linear(inputs, dequantised(weight, x.dtype))
    return y.view(*x.shape[:-1], weight.rows)


def few_bits_gated(x: Tensor, weight: Packed) -> Tensor | None:
    """``(silu(gate) * up) @ weight.T`` for x ``(rows, 2 columns)``, gate beside up; None where no tiles do it."""
    return gemm(x.contiguous(), weight, gated=True) if _has_tiles(len(x), weight) else None


def few_bits_normed(x: Tensor, norm: AddNorm, weight: Packed) -> ArrangedRows | None:
    """A norm of x ``(rows, columns)``, contiguous, as ``tiles.gemm_of`` reads it; None where no tiles do."""
    return arranged(x, weight, norm=norm) if _has_tiles(len(x), weight) else None


def _has_tiles(rows: int, weight: Packed) -> bool:
    return _FEW_ROWS.get(weight.bits, 1) < rows <= MOST_ROWS


@operator(lambda words, _s, _z, _bits, _group, columns, dtype: words.new_empty(len(words), columns, dtype=dtype))
def few_bits_written(
    words: Tensor, scale: Tensor, zeros: Tensor | None, bits: int, group: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """The weight ``(rows, columns)``, to the last bit what ``gac.runtime.storage.packed`` finds in PyTorch."""
    return dequantised(Packed(words, scale, zeros, bits, group, columns), dtype)
