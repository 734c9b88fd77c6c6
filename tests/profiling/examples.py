"""A shape of every operator, large enough that its last tile is cut, and its multiplications; a made-up sweep."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import numpy as np

from gac.plan.engines import MIXTURE_STEPS, STEPS
from gac.profiling.operators import OPERATORS
from gac.profiling.operators.base import Operator
from gac.profiling.table import Sweep
from gac.schemes import scheme_named

_LINEAR = {"m": 70, "k": 96, "n": 144}
_PAIR = {"m": 70, "k": 96, "r": 23, "n": 130}
_MODEL = {"layers": 2, "hidden": 96, "neurons": 144, "h": 6, "kv": 3, "d": 16, "vocabulary": 256}
_STEP = _MODEL | {"b": 2, "s": 1, "t": 40}
_ATTENTION = {"b": 2, "h": 6, "kv": 3, "s": 70, "t": 70, "d": 24}
_LATENTS = {"b": 2, "h": 4, "kv": 2, "t": 40, "d": 24, "g": 1, "k": 16, "v": 24}
_HEADS = {"m": 70, "k": 33, "heads": 4, "low": 67, "high": 90}
_COLLECTIVE = {"gpus": 3, "m": 70, "n": 96}
_INT4 = {"m": 70, "k": 96, "n": 72, "group": 32}

ROUNDINGS = ("round_to_fp8", "round_to_int8")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
"""They take several processes: ``tests/distributed`` runs them."""

GPU_ONLY = {
    "served_experts",
    *("int4_linear", "sdpa_efficient", "sdpa_efficient_causal", "sdpa_cudnn", "sdpa_cudnn_causal"),
    *("latent_attention", "latent_attention_int8", "latent_attention_int4", *ROUNDINGS),
}
"""Their kernels are CUDA's or Triton's."""

EXAMPLES: Mapping[str, Mapping[str, int]] = {
    **dict.fromkeys(("linear", "linear_rowwise", "served_linear"), _LINEAR),
    **dict.fromkeys(("low_rank", "served_low_rank"), _PAIR),
    **dict.fromkeys(STEPS, _STEP),
    **dict.fromkeys(MIXTURE_STEPS, _STEP | {"experts": 8, "top_k": 2}),
    "low_rank_shared": {"m": 70, "k": 96, "r": 23, "n": 130, "pairs": 3},
    "batched_gemm": {"b": 5, "m": 70, "k": 33, "n": 67},
    **dict.fromkeys(("batched_gemm_separate", "batched_gemm_bucketed", "batched_gemm_padded"), _HEADS),
    **dict.fromkeys(("int4_linear", "int4_linear_dequantised"), _INT4),
    **{name: _ATTENTION for name in OPERATORS.names if name.startswith("sdpa")},
    **{name: _LATENTS for name in OPERATORS.names if name.startswith("latent_attention")},
    "copy": {"n": 300},
    **{name: {"m": 37, "e": 5, "t": 2, "k": 48, "n": 24} for name in ("experts", "served_experts")},
    **{name: {"m": 3, "k": 48} for name in ROUNDINGS},
    **dict.fromkeys(COLLECTIVES, _COLLECTIVE),
}


def pair(m: int, k: int, r: int, n: int) -> int:
    return m * k * r + m * r * n


def attention(causal: bool, b: int, h: int, kv: int, s: int, t: int, d: int) -> int:
    seen = sum(1 for query, key in product(range(s), range(t)) if key <= query or not causal)
    return 2 * b * h * seen * d  # q @ k.T, and the weights @ v


def latent_attention(b: int, h: int, kv: int, t: int, d: int, g: int, k: int, v: int) -> int:
    keys, scores, mixed = t * kv * k * d, t * h * d, t * h * v
    return b * (keys + scores + mixed + h * v * d)


def heads(m: int, k: int, heads: int, low: int, high: int) -> int:
    assert (heads, low, high) == (4, 67, 90)
    return m * k * (67 + 74 + 82 + 90)


COUNTS: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(("linear", "linear_rowwise", "served_linear"), lambda m, k, n: m * k * n),
    **dict.fromkeys(("low_rank", "served_low_rank"), pair),
    "low_rank_shared": lambda m, k, r, n, pairs: pairs * pair(m, k, r, n),
    "batched_gemm": lambda b, m, k, n: b * m * k * n,
    **{f"batched_gemm_{way}": heads for way in ("separate", "bucketed", "padded")},
    **dict.fromkeys(("int4_linear", "int4_linear_dequantised"), lambda m, k, n, group: m * k * n),
    **{name: partial(attention, name.endswith("_causal")) for name in OPERATORS.names if name.startswith("sdpa")},
    **{name: latent_attention for name in OPERATORS.names if name.startswith("latent_attention")},
    **dict.fromkeys(("experts", "served_experts"), lambda m, e, t, k, n: 3 * m * t * k * n),
    **dict.fromkeys(("copy", *ROUNDINGS, *COLLECTIVES, *STEPS, *MIXTURE_STEPS), lambda **_axes: 0),
}
"""Multiplications of each operator, as its GEMMs have them."""

NAMES = (
    "fp8", "fp8_block", "w8a8", "w8a16", "w4a16", "w4a16:64", "w4a16:24", "w3a16", "w2a16", "nvfp4a16", "mxfp4a16",
)  # fmt: skip
SCHEMES = tuple(scheme_named(name).dtype for name in NAMES)
"""The dtypes of schemes that have a storage."""


def schemes_of(operator: Operator) -> tuple[str, ...]:
    """Those of them that run the operator's example."""
    return tuple(
        dtype for dtype in SCHEMES if operator.takes(dtype) and operator.refusal(EXAMPLES[operator.name], dtype) is None
    )


def make_sweep(points: Mapping[int, float], iqr: float = 0.0) -> Sweep:
    """Latencies of low-rank pairs by rank; ``iqr`` is relative to them."""
    dims = np.array(sorted(points), dtype=np.int64)
    ns = np.array([points[dim] for dim in dims.tolist()], dtype=np.float64)
    return Sweep("low_rank", "bf16", "cold", "r", (("m", 1024),), dims, ns, iqr * ns, ((),) * len(dims))
