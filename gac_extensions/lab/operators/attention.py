"""Attention in one backend of PyTorch.

Source of the refusals: PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from gac.profiling.operators.attention import PREFILL, Sdpa
from gac.profiling.operators.base import Axes, AxisSweep

if TYPE_CHECKING:
    from torch import Tensor

Backend = Literal["flash", "efficient", "cudnn", "math"]

FLASH_TEMPLATES = (32, 64, 96, 128, 160, 192, 224, 256)  # the head_dims that FlashAttention-2 was compiled for

_LARGEST = FLASH_TEMPLATES[-1]
_KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}


class BackendSdpa(Sdpa):
    """``Sdpa``, which PyTorch runs in this backend or refuses."""

    def __init__(self, backend: Backend, causal: bool) -> None:
        super().__init__(causal)
        self.backend = backend
        self.name = f"sdpa_{backend}_causal" if causal else f"sdpa_{backend}"
        self.cublas = backend == "math"
        # Some backends refuse 107 and 129; the slow Math backend is timed at fewer dims.
        step, heads = (32, 8) if backend == "math" else (8, 32)
        self.general = (AxisSweep("d", {*range(step, 257, step), 107, 129}, PREFILL | {"h": heads, "kv": heads}),)

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

        with sdpa_kernel(getattr(SDPBackend, _KERNELS[self.backend])):
            return super().run(inputs, outputs)


FLASH, FLASH_CAUSAL = BackendSdpa("flash", False), BackendSdpa("flash", True)
EFFICIENT, EFFICIENT_CAUSAL = BackendSdpa("efficient", False), BackendSdpa("efficient", True)
CUDNN, CUDNN_CAUSAL = BackendSdpa("cudnn", False), BackendSdpa("cudnn", True)
MATH, MATH_CAUSAL = BackendSdpa("math", False), BackendSdpa("math", True)
