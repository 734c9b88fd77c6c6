"""Triton, where it is installed: kernels import ``jit`` and ``tl`` from here, so that CPUs need none of it."""

from typing import Any

try:
    import triton.language as tl
    from triton import jit
except ImportError:

    class _Missing:
        """Stands for anything of Triton while modules with kernels are imported; no kernel can be launched."""

        def __getattr__(self, name: str) -> "_Missing":
            return self

        def __call__(self, *args: Any, **options: Any) -> "_Missing":
            return self

        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("Triton is not installed")

    jit = tl = _Missing()

__all__ = ["jit", "tl"]
