"""The work of a GEMM on a GPU, as terms whose fitted sum is its time: launch, bytes, FLOPs, tiles and waves."""

from dataclasses import dataclass

import numpy as np

from gac.core.arrays import Floats, Ints
from gac.profiling.operators.base import ACTIVATIONS, ITEM_BYTES

TILES = ((128, 256), (128, 128), (128, 64), (64, 64), (32, 64))
"""Rows and columns of the result that one CTA computes: the tiles that cuBLAS takes most, from large to small."""

FEW_ROWS = 64
_DEPTHS = (1024, 4096)
_HIDING, _HIDDEN_BYTES = 2048, (2000, 8000)  # k at most, and bytes read while one k is summed
_STEP, _OUTPUTS = 2048, 32  # of k, and of n for each SM: found by fitting
_LONG, _PROGRAMS = 2048, 8  # k from which programs of one row take 2 outputs; as many run on an SM at a time
_SHARED_TILES, _SHARING_PROGRAMS, _MOST_SHARING = ((64, 128), (64, 256)), 2, 8  # programs for each SM and tile, at most


@dataclass(frozen=True)
class Gpu:
    sm_count: int
    l2_bytes: int


def gemm_terms(m: int, k: Ints, n: Ints, gpu: Gpu, weight_bytes: Floats) -> Floats:
    """Return the terms of ``x[m, k] @ W[n, k].T``, all 0 or more; coefficients of 0 or more make the time of them.

    - the launch;
    - bytes: each operand once (the roofline's memory side; the fit takes the bandwidth, in whatever dtype);
    - depth: how long a CTA sums along k. Up to 64 rows it grows less and less, for cuBLAS then splits a long k. There
      the bytes of half the L2 are a term of their own, since a short read does not reach the bandwidth, and so is the
      larger of bytes and depth, since reading hides behind summing where there are few columns;
    - FLOPs, and waves: how often all SMs take up a tile, and that times k. A wave takes as long whether it fills the
      GPU or not, hence the stairs (NVIDIA, "Matrix Multiplication Background": tile and wave quantization).

    ``k``, ``n`` and the ``weight_bytes`` of W have shape ``(shapes,)``; x and the result take 16 bits a number. Returns
    shape ``(shapes, terms)``, each term in the order of 1.
    """
    depth, width = k.astype(np.float64), n.astype(np.float64)
    moved = ITEM_BYTES[ACTIVATIONS] * (m * depth + m * width) + weight_bytes
    launch, log_depth = np.ones(len(k)), np.log(np.maximum(depth, 8) / 8)
    if m <= FEW_ROWS:
        ramp = np.minimum(moved, gpu.l2_bytes / 2)
        terms = [launch, moved / 1e6, ramp / 1e6, log_depth, *(np.minimum(depth, most) / 1e3 for most in _DEPTHS)]
        terms += [np.maximum(moved, hidden * np.minimum(depth, _HIDING)) / 1e6 for hidden in _HIDDEN_BYTES]
        return np.stack(terms, axis=1)
    terms = [launch, moved / 1e6, log_depth, np.minimum(depth, _DEPTHS[0]) / 1e3, m * depth * width / 1e9, depth / 1e3]
    for rows, columns in TILES:
        waves = np.ceil(-(-m // rows) * -(-n // columns) / gpu.sm_count)
        terms += [waves, waves * depth / 1e3]
    return np.stack(terms, axis=1)


def row_terms(k: Ints, n: Ints, gpu: Gpu, weight_bytes: Floats) -> Floats:
    """Return the terms of one row times a low-bit weight, as ``gac.runtime.kernels.low_bit`` multiplies.

    Launch, bytes and depth are as in ``gemm_terms``. Programs take a long k in steps, one after the other. A step
    takes as long however little is left for it, and so does a wave of programs, however few there are: steps times
    waves. A k that fits one step takes its part of it.
    """
    depth, width = k.astype(np.float64), n.astype(np.float64)
    moved = ITEM_BYTES[ACTIVATIONS] * (depth + width) + weight_bytes
    steps = np.where(depth <= _STEP, depth / _STEP, np.ceil(depth / _STEP))
    waves = np.ceil(width / (_OUTPUTS * gpu.sm_count))
    return np.stack([np.ones(len(k)), moved / 1e6, np.log(np.maximum(depth, 8) / 8), steps * waves], axis=1)


def wide_row_terms(k: Ints, n: Ints, gpu: Gpu, weight_bytes: Floats) -> Floats:
    """Return the terms of one row times a weight of 16 bits, as ``gac.runtime.kernels.few_rows`` multiplies.

    Launch, bytes and depth are as in ``gemm_terms``. Programs take 2 outputs each, or 4 where k is short, in steps of
    k; so there are steps, waves, and steps times waves.
    """
    depth, width = k.astype(np.float64), n.astype(np.float64)
    moved = ITEM_BYTES[ACTIVATIONS] * (depth + width) + weight_bytes
    outputs, step = np.where(depth >= _LONG, 2, 4), np.where(depth >= _LONG, 1024, 512)
    steps, waves = np.ceil(depth / step), np.ceil(width / outputs / (_PROGRAMS * gpu.sm_count))
    ramp, log_depth = np.minimum(moved, gpu.l2_bytes / 2), np.log(np.maximum(depth, 8) / 8)
    return np.stack([np.ones(len(k)), moved / 1e6, ramp / 1e6, log_depth, steps, waves, steps * waves], axis=1)


def shared_terms(m: int, k: Ints, n: Ints, gpu: Gpu, weight_bytes: Floats) -> Floats:
    """Return the terms of 2 to 64 rows times a weight, as kernels multiply that let several programs share a tile.

    Those are the terms of ``gemm_terms``, and for each of two tiles (outputs, and columns of a step) how many programs
    share it, each with two steps at least, and the steps of each of them.
    """
    terms = [gemm_terms(m, k, n, gpu, weight_bytes)]
    for outputs, step in _SHARED_TILES:
        room = _SHARING_PROGRAMS * gpu.sm_count // np.ceil(n / outputs)
        sharing = np.clip(np.minimum(room, k // (2 * step)), 1, _MOST_SHARING)
        terms += [sharing, np.ceil(k / step / sharing)]
    return np.column_stack(terms)


def fitted(terms: Floats, ns: Floats) -> Floats:
    """Return coefficients of 0 or more with the least squares of relative errors; shape ``(terms,)``."""
    from scipy.optimize import nnls

    relative = terms / ns[:, None]
    scale = np.maximum(relative.max(axis=0), np.finfo(np.float64).tiny)
    coefficients: Floats = nnls(relative / scale, np.ones(len(ns)))[0] / scale
    return coefficients
