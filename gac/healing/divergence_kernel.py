"""A Triton kernel of KL(due || found) and its gradient: logits are read twice, and nothing is kept in float32."""

try:
    import triton
    import triton.language as tl
except ImportError as failure:
    raise RuntimeError("Triton is not installed") from failure

import torch
from torch import Tensor

from gac.runtime.gpu import launching_on

_WIDE, _WARPS = 2048, 8
_LOWEST = tl.constexpr(-1e30)  # finite, so that differences are


@triton.jit
def _logits(at, there):  # type: ignore[no-untyped-def]
    return tl.where(there, tl.load(at, mask=there, other=0.0).to(tl.float32), _LOWEST)


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    found, due, sums, gradient, of_found, of_due, size, WIDE: tl.constexpr, WANTED: tl.constexpr
):
    """A program takes a row: sums of exponentials lane by lane, each below the largest logit that its lane has met."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    own, other = found + row * of_found, due + row * of_due
    own_most = tl.full([WIDE], _LOWEST, tl.float32)
    other_most = tl.full([WIDE], _LOWEST, tl.float32)
    own_sum = tl.zeros([WIDE], tl.float32)
    other_sum = tl.zeros([WIDE], tl.float32)
    apart = tl.zeros([WIDE], tl.float32)
    for begin in range(0, size, WIDE):
        there = begin + at < size
        x = _logits(own + begin + at, there)
        y = _logits(other + begin + at, there)
        most = tl.maximum(own_most, x)
        own_sum = own_sum * tl.exp(own_most - most) + tl.exp(x - most)
        own_most = most
        most = tl.maximum(other_most, y)
        before, now = tl.exp(other_most - most), tl.exp(y - most)
        other_sum = other_sum * before + now
        apart = apart * before + tl.where(there, now * (y - x), 0.0)
        other_most = most
    most = tl.max(own_most, 0)
    own_log = most + tl.log(tl.sum(own_sum * tl.exp(own_most - most), 0))
    most = tl.max(other_most, 0)
    weight = tl.exp(other_most - most)
    whole = tl.sum(other_sum * weight, 0)
    other_log = most + tl.log(whole)
    tl.store(sums + row, tl.sum(apart * weight, 0) / whole - other_log + own_log)
    if WANTED:
        for begin in range(0, size, WIDE):
            there = begin + at < size
            x = _logits(own + begin + at, there)
            y = _logits(other + begin + at, there)
            change = tl.exp(x - own_log) - tl.exp(y - other_log)
            tl.store(gradient + row * size + begin + at, change, mask=there)


def divergence(found: Tensor, due: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """KL(due || found) of logits ``(tokens, vocabulary)``: float32 ``(tokens,)``, and its gradient where wanted."""
    found, due = (one if one.stride(1) == 1 else one.contiguous() for one in (found, due))
    rows, size = found.shape
    sums = found.new_empty(rows, dtype=torch.float32)
    gradient = found.new_empty(rows, size) if wanted else None
    with launching_on(found):
        _rows[(rows,)](
            found, due, sums, found if gradient is None else gradient, found.stride(0), due.stride(0), size,
            WIDE=_WIDE, WANTED=wanted, num_warps=_WARPS,
        )  # fmt: skip
    return sums, gradient
