"""RMSNorms of float32 states that PyTorch runs in one kernel, which are 6 as transformers writes them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from gac.runtime.one_launch import Norm, eps_of, norm_of
from gac.runtime.replaced import Forward


class _InOneKernel(Forward):
    """An RMSNorm of this kind. States in 16 bits are rounded between its steps, and run as before."""

    def __init__(self, norm: nn.Module, kind: str) -> None:
        super().__init__(norm)
        self._eps, self._more = eps_of(norm), 1.0 if kind == "gemma" else 0.0

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        if (hidden_states.dtype, weight.dtype) != (torch.float32, torch.float32):
            y: Tensor = self.plain(hidden_states)
            return y
        gain = weight + self._more if self._more else weight
        return functional.rms_norm(hidden_states, gain.shape, gain, self._eps)


@contextmanager
def in_one_kernel(*models: nn.Module) -> Iterator[None]:
    """With the RMSNorms of the models run so, but for those with a ``forward`` of others; as they were on exit."""
    modules = {module for model in models for module in model.modules()}
    own = {one: before for one in modules if isinstance(before := vars(one).get("forward"), Norm | None)}
    found = {module: kind for module in own if (kind := norm_of(module))}
    try:
        for module, kind in found.items():
            module.forward = _InOneKernel(module, kind)
        yield
    finally:
        for module in found:
            del module.forward
            if (before := own[module]) is not None:
                module.forward = before
