"""Weights of 8 bits that are multiplied with inputs of 8 bits: how they lie in tensors, and their product."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .packed import PackedIntegers
from .rounded_inputs import rounded_linear
from .storage import Held, Storage

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Integers8(PackedIntegers):
    """``PackedIntegers`` of 8 bits with a scale a row; inputs are rounded to 8 bits likewise, token by token."""

    bits: int = 8
    group: int | None = None
    zero: bool = False

    def multiply(self, x: Tensor, held: Held, rows: int, columns: int, bias: Tensor | None) -> Tensor:
        return rounded_linear("int8", x, self.values(held, rows, columns, x.dtype), bias)


@dataclass(frozen=True)
class Floats8(Storage):
    """``scale * number``: numbers in ``weight_float8`` (e4m3), scales in ``weight_scale`` (bfloat16, ``(rows, 1)``).

    Inputs are rounded to 8-bit floating point, token by token.
    """

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scales = (rows, 1 if columns else 0)
        return {"weight_float8": ((rows, columns), FLOAT8), "weight_scale": (scales, torch.bfloat16)}

    def values(self, held: Held, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return (held["weight_float8"].float() * held["weight_scale"].float()).to(dtype)

    def multiply(self, x: Tensor, held: Held, rows: int, columns: int, bias: Tensor | None) -> Tensor:
        return rounded_linear("float8", x, self.values(held, rows, columns, x.dtype), bias)
