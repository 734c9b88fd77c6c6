"""Scaled dot-product attention through PyTorch, by backend and with or without the causal mask.

Source of the refusals: PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, get_args

from gac.profiling.operators.base import Axes, AxisSweep, Operator, around, edges, joined

if TYPE_CHECKING:
    from torch import Tensor

Backend = Literal["auto", "flash", "efficient", "cudnn", "math"]

BACKENDS: tuple[Backend, ...] = get_args(Backend)

FLASH_TEMPLATES = (32, 64, 96, 128, 160, 192, 224, 256)  # the head_dims that FlashAttention-2 was compiled for

_LARGEST = FLASH_TEMPLATES[-1]
_KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}
_PREFILL = {"b": 1, "h": 32, "s": 1024, "t": 1024}
_DECODE = {"b": 8, "h": 32, "s": 1, "t": 2048}
_GQA_DIMS = {*range(8, 257, 8), *around(64, 4), *around(112, 20)}


class Sdpa(Operator):
    """``softmax(q[b, h, s, d] @ k[b, kv, t, d].T / sqrt(d)) @ v[b, kv, t, d]``; kv divides h (grouped-query attention).

    Query i sees keys 0 to i where causal: the mask is aligned to the top left where s and t differ. FLOPs are those of
    the two GEMMs over the pairs that are seen. The result is always a new tensor. PyTorch chooses the backend ``auto``.
    """

    axes = ("b", "h", "kv", "s", "t", "d")
    reads, writes = ("b h s d", "b kv t d", "b kv t d"), ("b h s d",)
    compressed_axis = "d"
    gemm_sides = {"d": "nk"}  # noqa: RUF012

    def __init__(self, backend: Backend, causal: bool) -> None:
        self.backend, self.causal = backend, causal
        self.name = "sdpa" + ("" if backend == "auto" else f"_{backend}") + ("_causal" if causal else "")
        self.general = _sweeps(backend, causal)
        self.cublas = backend == "math"

    def flops(self, axes: Axes) -> int:
        s, t = axes["s"], axes["t"]
        rising = min(s, t) if self.causal else 0  # under the mask queries see 1, 2, ... keys, up to t
        pairs = rising * (rising + 1) // 2 + (s - rising) * t
        return 4 * axes["b"] * axes["h"] * axes["d"] * pairs

    def unmet(self, axes: Axes) -> str | None:
        return "kv that divides h" if axes["h"] % axes["kv"] else None

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        h, kv, s, t, d = (axes[name] for name in ("h", "kv", "s", "t", "d"))
        mask = f"FlashAttention takes the causal mask on s = t only: s = {s}, t = {t}"
        heads = "memory-efficient attention takes as many heads of K and V as of Q only (PyTorch 2.6 to 2.11)"
        rules = {
            "flash": (
                (d > _LARGEST, f"FlashAttention takes heads up to {_LARGEST} only: d = {d}"),
                (self.causal and s != t, mask),
            ),
            "efficient": (
                (d % 8, f"memory-efficient attention takes heads that are a multiple of 8 only: d = {d}"),
                (kv != h, f"{heads}: h = {h}, kv = {kv}"),
            ),
            "cudnn": (
                (d % 8, f"cuDNN attention takes heads that are a multiple of 8 only: d = {d}"),
                (d > _LARGEST, f"cuDNN attention takes heads up to {_LARGEST} at most: d = {d}"),
                (t == 1, "cuDNN attention takes more than one key only: t = 1"),
            ),
        }
        return next((rule for broken, rule in rules.get(self.backend, ()) if broken), None)

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = inputs
        with nullcontext() if self.backend == "auto" else sdpa_kernel(getattr(SDPBackend, _KERNELS[self.backend])):
            gqa = k.shape[1] < q.shape[1]
            return [scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=gqa)]

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        import torch

        q, k, v = inputs
        rows = edges(q.shape[2], q.device)
        group = q.shape[1] // k.shape[1]
        parts = []
        for batch, head in {(0, 0), (q.shape[0] - 1, q.shape[1] - 1)}:
            key, value = k[batch, head // group], v[batch, head // group]
            scores = (q[batch, head, rows].float() @ key.float().t()) / math.sqrt(q.shape[3])
            if self.causal:
                scores = scores.masked_fill(torch.arange(len(key), device=q.device) > rows[:, None], -torch.inf)
            parts.append((result[0][batch, head, rows], scores.softmax(dim=1) @ value.float()))
        return joined(parts)


def _sweeps(backend: Backend, causal: bool) -> tuple[AxisSweep, ...]:
    if backend != "auto":  # some backends refuse 107 and 129; the slow Math backend is timed at fewer dims
        step, heads = (32, 8) if backend == "math" else (8, 32)
        return (AxisSweep("d", {*range(step, 257, step), 107, 129}, _PREFILL | {"h": heads, "kv": heads}),)
    prefill = (AxisSweep("d", range(8, 257), _PREFILL | {"kv": 32}), AxisSweep("d", _GQA_DIMS, _PREFILL | {"kv": 8}))
    if causal:
        return prefill
    return (
        *prefill,
        AxisSweep("d", range(8, 257), _DECODE | {"kv": 8}),
        AxisSweep("d", {*range(8, 257, 8), *around(128, 8)}, _DECODE | {"kv": 32}),
        # Along the cached tokens, of which some may be evicted: every 64, and a stretch of integers.
        AxisSweep("t", {*range(64, 2049, 64), *around(1024, 16)}, {"b": 8, "h": 32, "kv": 8, "s": 1, "d": 128}),
    )


OPERATORS = tuple(Sdpa(backend, causal) for backend in BACKENDS for causal in (False, True))
