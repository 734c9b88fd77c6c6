"""Inputs that are rounded token by token before they are multiplied, as 8-bit GEMMs read them: in plain PyTorch.

The numbers are multiplied as 16-bit ones, which hold them exactly, and the product takes the token's scale. They are
within 1, so that no sum leaves the range of float16.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

EXPONENT = 0x7F800000
"""The bits of a float32 that hold its exponent."""
TINY = torch.finfo(torch.float32).tiny


def read_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, over 128; the largest of a token is 127."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp_min(TINY)
    return (wide / scale).round_().div_(128).to(x.dtype), scale * 128


def read_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of 8-bit floating point (e4m3), over 512; the largest of a token is 448.

    They lie an eighth of the power of two below them apart, but 2^-9 at least. PyTorch's own conversion finds the same,
    and takes a CPU three times as long.
    """
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 448).clamp_min(TINY)
    found = wide / scale
    step = (found.view(torch.int32) & EXPONENT).view(torch.float32).div_(8).clamp_min_(2**-9)
    return found.div_(step).round_().mul_(step).div_(512).to(x.dtype), scale * 512


Reader = Callable[[Tensor], tuple[Tensor, Tensor]]

READERS: dict[str, Reader] = {"int8": read_int8, "float8": read_float8}
"""How inputs can be rounded: of x ``(..., features)`` the numbers, in its dtype, and a token's scale, ``(..., 1)``."""


def rounded_linear(reader: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``functional.linear`` of inputs as they are read: ``(..., out)`` for x ``(..., in)``."""
    numbers, scale = READERS[reader](x)
    y = (functional.linear(numbers, weight) * scale).to(x.dtype)
    return y if bias is None else y + bias
