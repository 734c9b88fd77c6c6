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

FLASH_TEMPLATES = (32, 64, 96, 128, 160, 192, 224, 256)
"""The head_dims that FlashAttention-2 was compiled for."""

_LARGEST = FLASH_TEMPLATES[-1]
_KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}
_PREFILL = {"b": 1, "h": 32, "s": 1024, "t": 1024}
_DECODE = {"b": 8, "h": 32, "s": 1, "t": 2048}
_GQA_DIMS = {*range(8, 257, 8), *around(64, 4), *around(112, 20)}


class Sdpa(Operator):
    """``softmax(q[b, h, s, d] @ k[b, kv, t, d].T / sqrt(d)) @ v[b, kv, t, d]``; kv divides h (grouped-query attention).

    Query i sees keys 0 to i where causal: the mask is aligned to the top left where s and t differ. FLOPs are those of
    the two GEMMs over the pairs that are seen. The result is always a new tensor.

    Args:
        backend: whose kernel runs (``auto``: PyTorch chooses).
        causal: apply the causal mask.
    """

    axes = ("b", "h", "kv", "s", "t", "d")
    reads, writes = ("b h s d", "b kv t d", "b kv t d"), ("b h s d",)
    compressed_axis = "d"
    gemm_sides = {"d": "nk"}  # noqa: RUF012

    def __init__(self, backend: Backend, causal: bool) -> None:
        self.backend = backend
        self.causal = causal
        self.name = "sdpa" + ("" if backend == "auto" else f"_{backend}") + ("_causal" if causal else "")
        self.general = _sweeps(backend, causal)
        if backend in ("efficient", "cudnn"):
            self.devices = ("cuda",)

    def flops(self, axes: Axes) -> int:
        return 4 * axes["b"] * axes["h"] * axes["d"] * self._pairs(axes["s"], axes["t"])

    def _pairs(self, s: int, t: int) -> int:
        """Count the pairs of a query and a key that it sees: under the mask 1 + 2 + ... up to t, then t a query."""
        if not self.causal:
            return s * t
        rising = min(s, t)
        return rising * (rising + 1) // 2 + (s - rising) * t

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
        q, k, v = inputs
        rows = edges(q.shape[2], q.device)
        group = q.shape[1] // k.shape[1]
        parts = []
        for batch, head in {(0, 0), (q.shape[0] - 1, q.shape[1] - 1)}:
            key, value = k[batch, head // group], v[batch, head // group]
            parts.append((result[0][batch, head, rows], self._reference(q[batch, head], key, value, rows)))
        return joined(parts)

    def _reference(self, q: "Tensor", k: "Tensor", v: "Tensor", rows: "Tensor") -> "Tensor":
        import torch

        scores = (q[rows].float() @ k.float().t()) / math.sqrt(q.shape[1])
        if self.causal:
            hidden = torch.arange(len(k), device=q.device) > rows[:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(dim=1) @ v.float()


def _sweeps(backend: Backend, causal: bool) -> tuple[AxisSweep, ...]:
    if backend != "auto":  # some backends refuse 107 and 129; the slow Math backend is timed at fewer dims
        step, heads = (32, 8) if backend == "math" else (8, 32)
        return (AxisSweep("d", {*range(step, 257, step), 107, 129}, _PREFILL | {"h": heads, "kv": heads}),)
    prefill = (AxisSweep("d", range(8, 257), _PREFILL | {"kv": 32}), AxisSweep("d", _GQA_DIMS, _PREFILL | {"kv": 8}))
    decode = (
        AxisSweep("d", range(8, 257), _DECODE | {"kv": 8}),
        AxisSweep("d", {*range(8, 257, 8), *around(128, 8)}, _DECODE | {"kv": 32}),
        # Along the cached tokens, of which some may be evicted: every 64, and a stretch of integers.
        AxisSweep("t", {*range(64, 2049, 64), *around(1024, 16)}, {"b": 8, "h": 32, "kv": 8, "s": 1, "d": 128}),
    )
    return prefill if causal else prefill + decode
