"""Rows of 8 bits, as GEMMs of 8 bits read them: rounded on a GPU as they are, or by the norm that makes them.

The kernels find what ``gac.runtime.rounded_inputs`` finds, of a norm up to the order of its sums. Triton is imported
when a kernel first runs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .gpu import launching_on, make_operator
from .rows import by_row, power_of_two, warps_for
from .tiles import COUNTERS

_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Rounded(NamedTuple):
    """Rows of 8 bits.

    Attributes:
        numbers: int8 or float8_e4m3fn, ``(rows, columns)``.
        scale: of each row, float32, ``(rows, 1)``.
        counters: int32 zeros, ``(COUNTERS,)``: programs that share a tile count there, and leave zeros.
    """

    numbers: Tensor
    scale: Tensor
    counters: Tensor


def rounded(x: Tensor, number: torch.dtype) -> Rounded:
    """x ``(rows, columns)``, contiguous, as numbers of 8 bits: one launch."""
    from .rounding_kernels import round_rows

    found = _empty(x, number)
    with launching_on(x):
        round_rows[(len(x),)](x, *found, x.shape[1], **_options(x.shape[1], number))
    return found


def normed(
    x: Tensor, weight: Tensor, eps: float, kind: str, number: torch.dtype, whole: bool
) -> tuple[Tensor, Rounded]:
    """What one of ``rows.NORMS`` makes of x ``(..., features)`` of 16 bits on a GPU, and the same rounded: one launch.

    Args:
        whole: whether it is written in 16 bits too; else what is returned of it has its shape, and is NaN.
    """
    out, *found = torch.ops.gac.normed_rows(x, weight, eps, kind, number, whole)
    return (out if whole else out.expand(x.shape)), Rounded(*found)


def _normed_rows(
    x: Tensor, weight: Tensor, eps: float, kind: str, number: torch.dtype, whole: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .rounding_kernels import norm_rows

    given, size = by_row(x), x.shape[-1]
    out, found = _whole(x, whole), _empty(given, number)
    with launching_on(x):
        norm_rows[(len(given),)](
            given, weight, out, *found, given.stride(0), size, eps,
            ADDED=kind == "gemma", WHOLE=whole, **_options(size, number),
        )  # fmt: skip
    return out, *found


def _whole(x: Tensor, whole: bool) -> Tensor:
    return x.new_empty(x.shape if whole else 1)


def _empty(x: Tensor, number: torch.dtype) -> Rounded:
    rows = x.shape[:-1].numel()
    return Rounded(
        x.new_empty(rows, x.shape[-1], dtype=number),
        x.new_empty(rows, 1, dtype=torch.float32),
        x.new_empty(COUNTERS, dtype=torch.int32),
    )


def _options(columns: int, number: torch.dtype) -> dict[str, int | float]:
    wide = power_of_two(columns)
    return {"MOST": _MOST[number], "WIDE": wide, "COUNTERS": COUNTERS, "num_warps": warps_for(columns)}


make_operator(
    "normed_rows",
    "(Tensor x, Tensor weight, float eps, str kind, ScalarType number, bool whole) -> (Tensor, Tensor, Tensor, Tensor)",
    _normed_rows,
    lambda x, _weight, _eps, _kind, number, whole: (_whole(x, whole), *_empty(x, number)),
)
