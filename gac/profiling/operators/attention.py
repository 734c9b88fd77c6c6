"""Scaled dot-product attention through PyTorch, with or without the causal mask."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gac.profiling.operators.base import Axes, AxisSweep, Operator, around, edges, joined

if TYPE_CHECKING:
    from torch import Tensor

PREFILL = {"b": 1, "h": 32, "s": 1024, "t": 1024}
_DECODE = {"b": 8, "h": 32, "s": 1, "t": 2048}
_GQA_DIMS = {*range(8, 257, 8), *around(64, 4), *around(112, 20)}
_PREFILL_SWEEPS = (
    AxisSweep("d", range(8, 257), PREFILL | {"kv": 32}),
    AxisSweep("d", _GQA_DIMS, PREFILL | {"kv": 8}),
)
_DECODE_SWEEPS = (
    AxisSweep("d", range(8, 257), _DECODE | {"kv": 8}),
    AxisSweep("d", {*range(8, 257, 8), *around(128, 8)}, _DECODE | {"kv": 32}),
    # Along the cached tokens, of which some may be evicted: every 64, and a stretch of integers.
    AxisSweep("t", {*range(64, 2049, 64), *around(1024, 16)}, {"b": 8, "h": 32, "kv": 8, "s": 1, "d": 128}),
)


class Sdpa(Operator):
    """``softmax(q[b, h, s, d] @ k[b, kv, t, d].T / sqrt(d)) @ v[b, kv, t, d]``; kv divides h (grouped-query attention).

    Query i sees keys 0 to i where causal: the mask is aligned to the top left where s and t differ. FLOPs are those of
    the two GEMMs over the pairs that are seen. The result is always a new tensor. PyTorch chooses the backend.
    """

    axes = ("b", "h", "kv", "s", "t", "d")
    reads, writes = ("b h s d", "b kv t d", "b kv t d"), ("b h s d",)
    compressed_axis = "d"
    cublas = False
    gemm_sides = {"d": "nk"}  # noqa: RUF012
    backend = "auto"

    def __init__(self, causal: bool) -> None:
        self.causal = causal
        self.name = "sdpa_causal" if causal else "sdpa"
        self.general = _PREFILL_SWEEPS if causal else (*_PREFILL_SWEEPS, *_DECODE_SWEEPS)

    def flops(self, axes: Axes) -> int:
        s, t = axes["s"], axes["t"]
        rising = min(s, t) if self.causal else 0  # under the mask queries see 1, 2, ... keys, up to t
        pairs = rising * (rising + 1) // 2 + (s - rising) * t
        return 4 * axes["b"] * axes["h"] * axes["d"] * pairs

    def unmet(self, axes: Axes) -> str | None:
        return "kv that divides h" if axes["h"] % axes["kv"] else None

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = inputs
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


OPERATORS = (Sdpa(causal=False), Sdpa(causal=True))
