"""Scaled dot-product attention, by backend and with or without the causal mask.

Source of the refusals: PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

from typing import Literal, get_args

from gac.profiling.operators.base import Axes, Operator

Backend = Literal["auto", "flash", "efficient", "cudnn", "math"]

BACKENDS: tuple[Backend, ...] = get_args(Backend)

FLASH_TEMPLATES = (32, 64, 96, 128, 160, 192, 224, 256)
"""The head_dims that FlashAttention-2 was compiled for."""

_LARGEST = FLASH_TEMPLATES[-1]


class Sdpa(Operator):
    """``softmax(q[b, h, s, d] @ k[b, kv, t, d].T / sqrt(d)) @ v[b, kv, t, d]``; kv divides h (grouped-query attention).

    Query i sees keys 0 to i where causal: the mask is aligned to the top left where s and t differ. FLOPs are those of
    the two GEMMs over the pairs that are seen.

    Args:
        backend: whose kernel runs (``auto``: PyTorch chooses).
        causal: whether the causal mask holds.
    """

    axes = ("b", "h", "kv", "s", "t", "d")
    reads, writes = ("b h s d", "b kv t d", "b kv t d"), ("b h s d",)
    runner = "gac.profiling.timing.runners.attention:SdpaRunner"

    def __init__(self, backend: Backend, causal: bool) -> None:
        self.backend = backend
        self.causal = causal
        self.name = "sdpa" + ("" if backend == "auto" else f"_{backend}") + ("_causal" if causal else "")

    def flops(self, axes: Axes) -> int:
        return 4 * axes["b"] * axes["h"] * axes["d"] * self._pairs(axes["s"], axes["t"])

    def _pairs(self, s: int, t: int) -> int:
        """Pairs of a query and a key that it sees: under the mask 1 + 2 + ... up to t, and t for every later query."""
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
