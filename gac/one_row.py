"""A low-rank pair of one row, as batch-1 decode has it, in two Triton kernels.

At one row a GEMM only waits for its weight to be read. Each kernel gives a program some output features, and reads
their rows of the weight in wide loads, several in flight. ``tests/benchmarks/README.md`` says what that gains on an
H100, and why it stops at one row.

Triton is imported when a pair is first launched: nothing here needs it before that.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, library

HAS_TRITON = find_spec("triton") is not None
_AT_ONCE = 4096  # numbers of a weight that a program loads in one step
_SECOND = 16  # features a program of the second GEMM, whose rows are short


def takes(x: Tensor) -> bool:
    """Whether the kernels take x: one row on a CUDA GPU, in 16 bit, with Triton there and no gradients kept."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() == x.shape[-1]
        and not torch.is_grad_enabled()
        and HAS_TRITON
    )


def launch(x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None, hidden: Tensor, out: Tensor) -> None:
    """``hidden = first @ x``, ``out = second @ hidden + bias``: two launches, which a CUDA graph can capture.

    Sums are taken in float32 and in a fixed order; the hidden activations are rounded as two GEMMs round them.

    Args:
        x: one row, with ``in`` elements.
        first: shape ``(rank, in)``.
        second: shape ``(out, rank)``.
        bias: shape ``(out,)``, or None.
        hidden: ``rank`` elements, written.
        out: ``out`` elements, written. All are contiguous, in one dtype, and on one device.

    Raises:
        RuntimeError: Triton is not installed.
    """
    features = _features(len(first), torch.cuda.get_device_properties(x.device).multi_processor_count)
    with torch.cuda.device(x.device):  # Triton launches on the current one
        _launch(x, first, None, hidden, features)
        _launch(hidden, second, bias, out, _SECOND)


def _features(count: int, sms: int) -> int:
    """Features a program of the first GEMM: the most, a power of two up to 16, that leave a program for every SM."""
    return max(1, min(16, 1 << max(0, (count // sms).bit_length() - 1)))


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, features: int) -> None:
    count, size = weight.shape
    grid = (-(-count // features),)
    _kernel()[grid](x, weight, bias, out, count, size, FEATURES=features, INPUTS=_AT_ONCE // features, num_warps=4)


@cache
def _kernel() -> Any:
    if not HAS_TRITON:
        raise RuntimeError("Triton is not installed")
    triton, tl = import_module("triton"), import_module("triton.language")

    @triton.jit  # type: ignore[untyped-decorator]
    def gemv_one_row(  # type: ignore[no-untyped-def]
        x,
        w,
        bias,
        out,
        n,
        k,
        FEATURES: tl.constexpr,  # type: ignore[name-defined]
        INPUTS: tl.constexpr,  # type: ignore[name-defined]
    ):
        """``out = w @ x + bias`` with w ``(n, k)``: a program reads FEATURES of its rows, INPUTS numbers a step."""
        features = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
        there = features < n
        rows = w + features.to(tl.int64)[:, None] * k
        total = tl.zeros((FEATURES, INPUTS), tl.float32)
        for start in tl.range(0, k, INPUTS, num_stages=4):
            at = start + tl.arange(0, INPUTS)
            inside = at < k
            given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(rows + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            total += weight.to(tl.float32) * given[None, :]
        result = tl.sum(total, axis=1)
        if bias is not None:
            result += tl.load(bias + features, mask=there, other=0.0).to(tl.float32)
        tl.store(out + features, result.to(out.dtype.element_ty), mask=there)

    return gemv_one_row


def _pair(x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(*x.shape[:-1], len(second))
    launch(x.contiguous(), first, second, bias, x.new_empty(len(first)), out)
    return out


def _like_pair(x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
    """What torch.compile has to know of the result."""
    return x.new_empty(*x.shape[:-1], len(second))


def _operator() -> Any:
    schema = "(Tensor x, Tensor first, Tensor second, Tensor? bias) -> Tensor"
    operator = library.custom_op("gac::one_row_pair", _pair, mutates_args=(), schema=schema)
    operator.register_fake(_like_pair)
    return operator


one_row_pair = _operator()
"""``second @ (first @ x) + bias`` of one row x, shape ``(..., in)``, as an operator that torch.compile leaves whole."""
