"""Norms and rotary embeddings in one launch each while a model is trained, and gated products of one that teaches."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from gac.runtime.fusion.elementwise import Forward, Norm, eps_of, fuse_elementwise


class _InOneKernel(Forward):
    """An RMSNorm of this kind, with gradients. States in 16 bits are rounded between its steps, and run as before."""

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
        y = functional.rms_norm(hidden_states, gain.shape, gain, self._eps)
        kind = y.device.type  # autocast rounds it for every weight that reads it: once is enough
        return y.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else y


@contextmanager
def in_one_launch(*models: nn.Module) -> Iterator[None]:
    """With these parts of models run so, but for those with a ``forward`` of others; as they were on exit."""
    before = {module: vars(module).get("forward") for model in models for module in model.modules()}
    try:
        for model in models:
            fuse_elementwise(model)
        norms = {module: norm for module in before if isinstance(norm := vars(module).get("forward"), Norm)}
        for module, norm in norms.items():
            module.forward = _InOneKernel(module, norm.kind)
        yield
    finally:
        for module, own in before.items():
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own
