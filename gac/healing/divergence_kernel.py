"""Triton kernels of KL(due || found) and of its gradient: each reads all logits once; none are kept in float32."""

try:
    import triton
    import triton.language as tl
except ImportError as failure:
    raise RuntimeError("Triton is not installed") from failure

import torch
from torch import Tensor

from gac.runtime.kernels.gpu import ceil_div, launching_on

_WIDE, _WARPS = 2048, 8
_LOWEST = tl.constexpr(-1e30)  # finite, so that differences are


@triton.jit
def _logits(at, there):  # type: ignore[no-untyped-def]
    return tl.where(there, tl.load(at, mask=there, other=0.0).to(tl.float32), _LOWEST)


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    found, due, sums, logs, of_found, of_due, size, WIDE: tl.constexpr
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
    tl.store(logs + 2 * row, own_log)
    tl.store(logs + 2 * row + 1, other_log)


@triton.jit  # type: ignore[untyped-decorator]
def _changes(  # type: ignore[no-untyped-def]
    found, due, logs, kept, labels, by, gradient, of_found, of_due, size, WIDE: tl.constexpr
):
    """A program takes WIDE logits of a row: what is due is kept * probabilities, and 1 - kept of the label."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    there = at < size
    own = tl.exp(_logits(found + row * of_found + at, there) - tl.load(logs + 2 * row))
    other = tl.exp(_logits(due + row * of_due + at, there) - tl.load(logs + 2 * row + 1))
    part = tl.load(kept + row)
    wanted = part * other + tl.where(at == tl.load(labels + row), 1.0 - part, 0.0)
    tl.store(gradient + row * size + at, (own - wanted) * tl.load(by), mask=there)


def divergences(found: Tensor, due: Tensor) -> tuple[Tensor, Tensor]:
    """KL(due || found) of logits ``(tokens, vocabulary)``, float32 ``(tokens,)``.

    Also the logarithms of both sums of exponentials, float32 ``(tokens, 2)``, which the gradient starts from.
    """
    found, due = map(_rowwise, (found, due))
    rows, size = found.shape
    sums, logs = (found.new_empty(shape, dtype=torch.float32) for shape in ((rows,), (rows, 2)))
    with launching_on(found):
        _rows[(rows,)](found, due, sums, logs, found.stride(0), due.stride(0), size, WIDE=_WIDE, num_warps=_WARPS)
    return sums, logs


def gradient(found: Tensor, due: Tensor, logs: Tensor, kept: Tensor, labels: Tensor, by: Tensor) -> Tensor:
    """Of the sum of kept * KL(due || found) - (1 - kept) * ln found[label], by the logits that were found.

    Args:
        logs: from ``divergences``.
        kept: float32 ``(tokens,)``.
        labels: ``(tokens,)``.
        by: float32, what the gradient is multiplied by.

    Returns:
        In the dtype of the logits.
    """
    found, due = map(_rowwise, (found, due))
    rows, size = found.shape
    made = found.new_empty(rows, size)
    with launching_on(found):
        _changes[(rows, ceil_div(size, _WIDE))](
            found, due, logs, kept, labels, by, made, found.stride(0), due.stride(0), size, WIDE=_WIDE, num_warps=_WARPS
        )
    return made


def _rowwise(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
