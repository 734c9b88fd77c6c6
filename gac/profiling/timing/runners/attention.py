"""Scaled dot-product attention through PyTorch, on the operator's backend."""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gac.profiling.operators.attention import Backend, Sdpa
from gac.profiling.timing.runners import Runner, edges, joined

_KERNELS: dict[Backend, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class SdpaRunner(Runner):
    """``scaled_dot_product_attention``, which allocates its result.

    Args:
        operator: names the backend; PyTorch chooses where it is ``auto``.
    """

    def __init__(self, operator: Sdpa) -> None:
        super().__init__(operator)
        self.causal = operator.causal
        self.kernel = _KERNELS.get(operator.backend)
        if operator.backend in ("efficient", "cudnn"):
            self.devices = ("cuda",)

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        q, k, v = inputs
        with nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
            gqa = k.shape[1] < q.shape[1]
            return [scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=gqa)]

    def compare(self, inputs: Sequence[Tensor], result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v = inputs
        rows = edges(q.shape[2], q.device)
        shared = q.shape[1] // k.shape[1]
        parts = []
        for batch, head in {(0, 0), (q.shape[0] - 1, q.shape[1] - 1)}:
            key, value = k[batch, head // shared], v[batch, head // shared]
            parts.append((result[0][batch, head, rows], self._reference(q[batch, head], key, value, rows)))
        return joined(parts)

    def _reference(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        """Attention of these rows of one head in float32."""
        scores = (q[rows].float() @ k.float().t()) / math.sqrt(q.shape[1])
        if self.causal:
            hidden = torch.arange(len(k), device=q.device) > rows[:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(dim=1) @ v.float()
