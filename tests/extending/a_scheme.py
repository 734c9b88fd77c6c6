"""A scheme: 16-bit numbers with 3 bits of mantissa instead of 7, the other bits 0.

They take as many bytes and run as fast. What is sent around is smaller: a file of such weights packs to about half its
size with any lossless compressor, for sign, exponent and what is left of the mantissa hold 7 bits of information or so.
"""

import torch
from torch import Tensor

from gac.schemes import Scheme
from gac.schemes.feedback.order import Inputs

_BITS = 3


class ShortMantissa(Scheme):
    """Each number to the nearest with ``_BITS`` bits after the leading one; halves to even."""

    name = "bf16-m3"
    dtype = "bf16"  # latency tables have it under this name: it runs as any 16-bit weight does
    bits = 16

    def quantised(self, matrix: Tensor, inputs: Inputs | None = None, gradients: Tensor | None = None) -> Tensor:
        mantissa, exponent = torch.frexp(matrix)  # mantissa in [0.5, 1), so that one bit is the leading one
        step = 2 ** (_BITS + 1)
        return torch.ldexp(torch.round(mantissa * step) / step, exponent)
