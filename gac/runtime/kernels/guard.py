"""Triton, where it is installed: kernels import what they need of it from here, so that CPUs need none of it."""

from typing import Any

try:
    import triton.language as tl
    from triton import jit
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:

    class _Missing:
        """Stands for anything of Triton while modules with kernels are imported; no kernel can be launched."""

        def __getattr__(self, name: str) -> "_Missing":
            return self

        def __call__(self, *args: Any, **options: Any) -> "_Missing":
            return self

        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("Triton is not installed")

    jit = tl = gdc_launch_dependents = gdc_wait = _Missing()

__all__ = ["gdc_launch_dependents", "gdc_wait", "jit", "tl"]
