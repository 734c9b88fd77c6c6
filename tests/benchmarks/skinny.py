"""A GEMM of at most 16 rows, and the low-rank pair of two of them, as they read memory fastest (Triton).

Such a GEMM only waits for its weight. A pair waits twice, the second time for a kernel that starts when the first one
has ended: so the second is launched early (programmatic dependent launch, compute capability 9.0) and has its weight
brought into L2 while the first still runs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_ROWS = 16

_LINE = tl.constexpr(64)  # 16-bit numbers in 128 bytes of L2


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut: output features and inputs a step, steps in flight, warps, and parts that k is cut in."""

    features: int
    inputs: int
    stages: int
    warps: int = 4
    parts: int = 1


@dataclass(frozen=True)
class PairTiles:
    """Of both launches; ``early``: the second is launched early and prefetches its weight."""

    first: Tiles
    second: Tiles
    early: bool


@triton.jit
def _prefetch(w, features, n, k, LINES: tl.constexpr):
    """Bring these rows of w into L2."""
    lines = tl.minimum(tl.arange(0, LINES) * _LINE, k - 1)
    places = w + tl.minimum(features, n - 1).to(tl.int64)[:, None] * k + lines[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _one_row(
    x, w, w_rows, there, begin, end, k,
    SUMMED: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``sum(x)[begin:end] @ w[features, begin:end].T``, shape (FEATURES,)."""
    total = tl.zeros((FEATURES, INPUTS), tl.float32)
    for start in tl.range(begin, end, INPUTS, num_stages=STAGES):
        at = start + tl.arange(0, INPUTS)
        inside = at < end
        given = tl.zeros((INPUTS,), tl.float32)
        for one in tl.static_range(SUMMED):
            given += tl.load(x + one * k + at, mask=inside, other=0.0).to(tl.float32)
        given = given.to(w.dtype.element_ty).to(tl.float32)
        weight = tl.load(w_rows + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        total += weight.to(tl.float32) * given[None, :]
    return tl.sum(total, axis=1)


@triton.jit
def _some_rows(
    x, w, w_rows, there, begin, end, k, m,
    SUMMED: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same of several rows, transposed, shape (FEATURES, ROWS)."""
    rows = tl.arange(0, ROWS)
    total = tl.zeros((FEATURES, ROWS), tl.float32)
    for start in tl.range(begin, end, INPUTS, num_stages=STAGES):
        at = start + tl.arange(0, INPUTS)
        inside = at < end
        held = inside[:, None] & (rows < m)[None, :]
        places = x + rows[None, :] * k + at[:, None]
        if SUMMED == 1:
            given = tl.load(places, mask=held, other=0.0).to(w.dtype.element_ty)
        else:
            summed = tl.zeros((INPUTS, ROWS), tl.float32)
            for one in tl.static_range(SUMMED):
                summed += tl.load(places + one * m * k, mask=held, other=0.0)
            given = summed.to(w.dtype.element_ty)
        weight = tl.load(w_rows + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        total = tl.dot(weight, given, total)
    return total


@triton.jit(do_not_specialize=["m"])
def _skinny(
    x, w, out, m, n, k, span,
    SUMMED: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    LEADS: tl.constexpr, FOLLOWS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """``out[part] = sum(x) @ w.T`` over the part's span of k; x is (SUMMED, m, k), w (n, k), out (parts, m, n)."""
    features = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    part = tl.program_id(1)
    there = features < n
    w_rows = w + features.to(tl.int64)[:, None] * k
    if LEADS:
        gdc_launch_dependents()
    if FOLLOWS:
        _prefetch(w, features, n, k, LINES)
        gdc_wait()
    begin = part * span
    end = tl.minimum(begin + span, k)
    if ROWS == 1:
        result = _one_row(x, w, w_rows, there, begin, end, k, SUMMED, FEATURES, INPUTS, STAGES)
        tl.store(out + part * n + features, result.to(out.dtype.element_ty), mask=there)
    else:
        results = _some_rows(x, w, w_rows, there, begin, end, k, m, SUMMED, ROWS, FEATURES, INPUTS, STAGES)
        rows = tl.arange(0, ROWS)
        targets = out + (part * m + rows)[None, :] * n + features[:, None]
        tl.store(targets, results.to(out.dtype.element_ty), mask=there[:, None] & (rows < m)[None, :])


def _launch(x: Tensor, w: Tensor, out: Tensor, tiles: Tiles, summed: int, leads: bool, follows: bool) -> None:
    m, (n, k) = x.shape[-2], w.shape
    options: Any = {"launch_pdl": True} if follows else {}
    steps = triton.cdiv(triton.cdiv(k, tiles.inputs), tiles.parts)
    _skinny[(triton.cdiv(n, tiles.features), tiles.parts)](
        x, w, out, m, n, k, steps * tiles.inputs,
        SUMMED=summed, ROWS=1 if m == 1 else MOST_ROWS, FEATURES=tiles.features, INPUTS=tiles.inputs,
        STAGES=tiles.stages, LEADS=leads, FOLLOWS=follows,
        LINES=triton.next_power_of_2(triton.cdiv(k, 64)) if follows else 1, num_warps=tiles.warps, **options,
    )  # fmt: skip


def pair(x: Tensor, first: Tensor, second: Tensor, out: Tensor, tiles: PairTiles) -> None:
    """``out = (x @ first.T) @ second.T`` for x ``(m, k)`` with m <= 16, all contiguous and in one 16-bit dtype.

    The hidden activations are rounded to that dtype, as two GEMMs would. Sums are taken in a fixed order.
    """
    m, rank, parts = len(x), len(first), tiles.first.parts
    hidden = x.new_empty((parts, m, rank), dtype=x.dtype if parts == 1 else torch.float32)
    _launch(x, first, hidden, tiles.first, summed=1, leads=tiles.early, follows=False)
    _launch(hidden, second, out, tiles.second, summed=parts, leads=False, follows=tiles.early)
