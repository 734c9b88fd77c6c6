"""RMSNorms that PyTorch runs in one kernel, and backwards in two: as transformers writes them they are 6 and 12."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional

from gac.runtime.one_launch import eps_of, norm_of
from gac.runtime.replaced import Forward


class _InOneKernel(Forward):
    """An RMSNorm of this kind; its weight is read in the dtype of what is normed."""

    def __init__(self, norm: nn.Module, kind: str) -> None:
        super().__init__(norm)
        self._eps, self._more = eps_of(norm), 1.0 if kind == "gemma" else 0.0

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        gain = (weight + self._more if self._more else weight).to(hidden_states.dtype)
        return functional.rms_norm(hidden_states, gain.shape, gain, self._eps)


@contextmanager
def in_one_kernel(*models: nn.Module) -> Iterator[None]:
    """With all RMSNorms of the models run so; they are as they were on exit."""
    found = [(module, kind) for model in models for module in model.modules() if (kind := norm_of(module))]
    before = [vars(module).get("forward") for module, _ in found]
    try:
        for module, kind in found:
            module.forward = _InOneKernel(module, kind)
        yield
    finally:
        for (module, _), forward in zip(found, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward
