"""Weights of 8 bits that are multiplied with inputs of 8 bits.

They lie as compressed-tensors' ``int-quantized`` and ``float-quantized`` have them: numbers in ``weight``, scales in
``weight_scale``, ``(rows, 1)`` or, of blocks, ``(rows / 128, columns / 128)``. Inputs are quantised likewise: token by
token, or 128 columns of each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gac.runtime.kernels.elementwise.rows import AddNorm
from gac.runtime.kernels.int8_fp8 import eight_bits_linear, eight_bits_linear_of, gemm_unsupported_reason
from gac.runtime.kernels.quantise_rows import QuantisedRows, add_norm_quantised, quantise_rows
from gac.runtime.plain import modeling_gac
from gac.runtime.storage.base import Storage, Tensors, not_scales


class _EightBits(Storage):
    def flaw(self, tensors: Tensors, rows: int, columns: int) -> str | None:
        return not_scales(tensors, "weight_scale")

    def can_slice_columns(self, columns: slice, total: int) -> bool:
        return True

    def slice_columns(self, tensors: Tensors, columns: slice, total: int) -> dict[str, Tensor]:
        return {"weight": tensors["weight"][:, columns], "weight_scale": tensors["weight_scale"]}

    def kernel_unsupported_reason(self, device: torch.device, rows: int, columns: int) -> str | None:
        return gemm_unsupported_reason(self.number, device, rows, columns)

    def kernel(self, x: Tensor, tensors: Tensors, columns: int) -> Tensor:
        return eight_bits_linear(x, tensors["weight"], tensors["weight_scale"], self.block)

    def gated_kernel(self, x: Tensor, tensors: Tensors, columns: int) -> Tensor | None:
        rows = quantise_rows(x.contiguous(), tensors["weight"].dtype, self.block, gated=True)
        return self.kernel_of_prepared(rows, tensors, x.dtype)

    def normed_inputs(self, x: Tensor, norm: AddNorm, tensors: Tensors, columns: int) -> QuantisedRows:
        return add_norm_quantised(x, norm, tensors["weight"].dtype, self.block)

    def kernel_of_prepared(self, inputs: QuantisedRows, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        return eight_bits_linear_of(*inputs, tensors["weight"], tensors["weight_scale"], dtype, self.block)


@dataclass(frozen=True)
class Integers8(modeling_gac.Integers8, _EightBits):
    """Integers from -128 to 127, with scales in float16."""


@dataclass(frozen=True)
class Floats8(modeling_gac.Floats8, _EightBits):
    """8-bit floating point (e4m3), with scales in bfloat16."""

    def flaw(self, tensors: Tensors, rows: int, columns: int) -> str | None:
        nan = tensors["weight"].view(torch.uint8) & 127 == 127  # e4m3fn has no infinity
        if bool(nan.any()):
            return f"weight holds {int(nan.sum())} numbers that are not finite; expected none"
        return super().flaw(tensors, rows, columns)


@dataclass(frozen=True)
class Floats8Blocks(modeling_gac.Floats8Blocks, Floats8):
    """The same with a float32 scale for each block of 128 rows and columns; a last block may have fewer of either."""

    @property
    def step(self) -> int:
        return self.block

    def slice_rows(self, tensors: Tensors, rows: slice) -> dict[str, Tensor]:
        blocks = slice(rows.start // self.block, -(-rows.stop // self.block))
        return {"weight": tensors["weight"][rows], "weight_scale": tensors["weight_scale"][blocks]}

    def can_slice_columns(self, columns: slice, total: int) -> bool:
        return all(end % self.block == 0 or end == total for end in (columns.start, columns.stop))

    def slice_columns(self, tensors: Tensors, columns: slice, total: int) -> dict[str, Tensor]:
        blocks = slice(columns.start // self.block, -(-columns.stop // self.block))
        return {"weight": tensors["weight"][:, columns], "weight_scale": tensors["weight_scale"][:, blocks]}


READERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "int8": Integers8().quantise,
    "float8": Floats8().quantise,
    "float8_groups": Floats8Blocks().quantise,
}
"""Ways to quantise inputs: of x ``(..., features)`` numbers in its dtype, and a scale a token, ``(..., 1)``.

Where groups of columns have scales of their own, these are in the numbers, and the scale is 1.
"""
