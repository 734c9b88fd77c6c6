"""A kernel that reads the words of a weight and does nothing with them: the least time that a product can take."""

import triton
import triton.language as tl
from torch import Tensor

from gac.runtime.kernels.gpu import ceil_div

_AT_ONCE = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _read(words, out, count, n, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    found = tl.max(tl.load(words + at, mask=at < count, other=0))
    tl.store(out + tl.program_id(0) % n, found.to(out.dtype.element_ty))


def read(x: Tensor, words: Tensor) -> Tensor:
    """The largest words, which nobody wants, where ``(1, rows)`` of a product would be."""
    out = x.new_empty(1, len(words))
    _read[(ceil_div(words.numel(), _AT_ONCE),)](words, out, words.numel(), len(words), AT_ONCE=_AT_ONCE, num_warps=4)
    return out
