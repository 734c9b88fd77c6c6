"""Linear weights of one row, as decoding one sequence has them, in a Triton kernel; and models that run in it.

At one row a GEMM only waits for its weight to be read. The kernel gives a program some output features, and reads their
rows of the weight in wide loads, several in flight. ``docs/results-speed.md`` says what that gains on an H100, and
why it stops at one row.

Python takes longer to launch a Triton kernel than the kernel takes. So it runs in CUDA graphs and in compiled code.
Triton is imported when the kernel is first launched: nothing here needs it before that.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.nn import functional

from .gpu import HAS_TRITON, SIXTEEN_BIT, ceil_div, launching_on
from .modules import ValueLinear
from .shared_gemm import FusedInput

_AT_ONCE = 4096  # numbers of a weight that a program loads in one step
_MOST = 16  # features of a program
_SCHEMA = "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
_run_before: set[tuple[Any, ...]] = set()


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: in the kernel where it can run and is faster, else in PyTorch. Call ``prepare`` before.

    Args:
        x: shape ``(..., in)``.
        weight: shape ``(out, in)``.
        bias: shape ``(out,)``, or None.
    """
    if _is_one_row(x) and _is_worthwhile(x, weight, bias):
        y: Tensor = _operator()(x, weight, bias)
        return y
    return functional.linear(x, weight, bias)


def _operator() -> Any:
    return torch.ops.gac.decode_linear


def _is_one_row(x: Tensor) -> bool:
    return x.is_cuda and x.numel() == x.shape[-1] and x.dtype in SIXTEEN_BIT


def _is_worthwhile(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can run and its launch costs nothing: in compiled code, and while a CUDA graph is captured.

    It also runs the first time, because no kernel can be loaded while a graph is captured.
    """
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return takes(x, weight, bias)
    known = (weight.device, weight.dtype, weight.shape, bias is None)
    if known in _run_before or not takes(x, weight, bias):
        return False
    prepare()
    _run_before.add(known)
    return True


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can run: one row on a CUDA GPU, in 16 bit, with Triton installed and gradients off.

    It cannot run for a weight that is quantised, or on another device.
    """
    return (
        _is_one_row(x)
        and HAS_TRITON
        and not torch.is_grad_enabled()
        and all(_beside(x, one) for one in (weight, bias) if one is not None)
    )


def _beside(x: Tensor, values: Tensor) -> bool:
    plain = type(values) in (nn.Parameter, Tensor) and values.is_contiguous()
    return plain and (values.dtype, values.device) == (x.dtype, x.device)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, wrap: Any = None) -> None:
    """``out = weight @ x + bias``: one launch, which a CUDA graph can capture.

    Sums are taken in float32 and in a fixed order.

    Args:
        x: one row, with ``in`` elements.
        weight: shape ``(out, in)``.
        bias: shape ``(out,)``, or None.
        out: ``out`` elements, written. All are contiguous, in one dtype, and on one device.
        wrap: what is made of the kernel before it is launched.

    Raises:
        RuntimeError: Triton is not installed.
    """
    kernel = _kernel() if wrap is None else wrap(_kernel())
    count, size = weight.shape
    features = _features(count, size, torch.cuda.get_device_properties(x.device).multi_processor_count)
    with launching_on(x):
        kernel[(ceil_div(count, features),)](
            x, weight, bias, out, count, size, FEATURES=features, INPUTS=_AT_ONCE // features, num_warps=4
        )


def _features(count: int, size: int, sms: int) -> int:
    """Output features of a program, a power of two up to 16.

    The most that leave a program for every SM, or more where the rows of the weight are shorter than one step.
    """
    for_sms = 1 << max(0, (count // sms).bit_length() - 1)
    for_rows = _AT_ONCE >> (size - 1).bit_length() if size <= _AT_ONCE else 1
    return min(_MOST, max(for_sms, for_rows))


@cache
def _kernel() -> Any:
    if not HAS_TRITON:
        raise RuntimeError("Triton is not installed")
    triton, tl = import_module("triton"), import_module("triton.language")

    @triton.jit  # type: ignore[untyped-decorator]
    def gemv(  # type: ignore[no-untyped-def]
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

    return gemv


def prepare() -> None:
    """Make the kernel an operator that torch.compile can trace, ``gac::decode_linear``; nothing without Triton.

    This loads Triton's compiler, so it is done on request only.
    """
    if HAS_TRITON and not hasattr(torch.ops.gac, "decode_linear"):
        library.triton_op("gac::decode_linear", _decode_linear, mutates_args=(), schema=_SCHEMA)


def _decode_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(*x.shape[:-1], len(weight))
    launch(x.contiguous(), weight, bias, out, library.wrap_triton)
    return out


class DecodeLinear(nn.Linear):
    """A linear weight that multiplies one row in Triton."""

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)


def use_decode_kernel(model: Any) -> None:
    """Let every linear weight but the head multiply one row in Triton; the model is changed in place.

    Parameters and their names stay. Quantised weights, which are other modules, run as before.

    Args:
        model: a causal LM of transformers, or the model within.
    """
    prepare()
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = DecodeLinear
        elif isinstance(module, FusedInput | ValueLinear):
            module.multiply = multiply
