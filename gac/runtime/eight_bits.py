"""Weights of 8 bits that are multiplied with inputs of 8 bits: how they lie in tensors, and their product.

They lie as compressed-tensors' ``int-quantized`` and ``float-quantized`` have them.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .eight_bits_gemm import linear, linear_of, unread
from .rounded_inputs import rounded_linear
from .rounded_rows import Rounded
from .storage import Held, Storage, not_scales

FLOAT8 = torch.float8_e4m3fn


class EightBits(Storage):
    """``scale * number``: numbers in ``weight``, scales in ``weight_scale`` (``(rows, 1)``).

    Inputs are rounded likewise, token by token.

    Attributes:
        number: dtype of a number.
        scale: dtype of a scale.
        reads: what rounds inputs, by its name in ``gac.runtime.rounded_inputs.READERS``.
    """

    number: ClassVar[torch.dtype]
    scale: ClassVar[torch.dtype]
    reads: ClassVar[str]

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scales = (rows, 1 if columns else 0)
        return {"weight": ((rows, columns), self.number), "weight_scale": (scales, self.scale)}

    def values(self, held: Held, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return (held["weight"].float() * held["weight_scale"].float()).to(dtype)

    def flaw(self, held: Held, rows: int, columns: int) -> str | None:
        return not_scales(held, "weight_scale")

    def cuts(self, columns: slice, of: int) -> bool:
        return True

    def cut(self, held: Held, columns: slice, of: int) -> dict[str, Tensor]:
        return {"weight": held["weight"][:, columns], "weight_scale": held["weight_scale"]}

    def plain(self, x: Tensor, held: Held, rows: int, columns: int, bias: Tensor | None) -> Tensor:
        return rounded_linear(self.reads, x, self.values(held, rows, columns, x.dtype), bias)

    def unread(self, device: torch.device, rows: int, columns: int) -> str | None:
        return unread(self.number, device, rows, columns)

    def kernel(self, x: Tensor, held: Held, columns: int) -> Tensor:
        return linear(x, held["weight"], held["weight_scale"])

    def kernel_of(self, x: Rounded, held: Held, dtype: torch.dtype) -> Tensor:
        return linear_of(x, held["weight"], held["weight_scale"], dtype)


@dataclass(frozen=True)
class Integers8(EightBits):
    """Whole numbers from -128 to 127, with scales in float16."""

    number, scale, reads = torch.int8, torch.float16, "int8"


@dataclass(frozen=True)
class Floats8(EightBits):
    """8-bit floating point (e4m3), with scales in bfloat16."""

    number, scale, reads = FLOAT8, torch.bfloat16, "float8"

    def flaw(self, held: Held, rows: int, columns: int) -> str | None:
        nan = held["weight"].view(torch.uint8) & 127 == 127  # e4m3fn has no infinity
        if bool(nan.any()):
            return f"weight holds {int(nan.sum())} numbers that are not finite; expected none"
        return super().flaw(held, rows, columns)
