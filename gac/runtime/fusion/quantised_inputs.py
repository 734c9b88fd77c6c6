"""Inputs of 8 bits that are quantised where they are made, in an RMSNorm.

A norm is read by several weights, and each would quantise its output again. So the norm does it, in the same kernel,
and remembers which tensor that was; weights that are called with this very tensor take the quantised one. The tensor
itself is not written where nothing else reads it: it has its shape, and is NaN. Modules and their names stay. Where no
kernel can run, with gradients, in training and under hooks, their own ``forward`` runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gac.runtime.fusion.elementwise import Norm, norm_of
from gac.runtime.fusion.shared_gemm import first_of
from gac.runtime.kernels.quantise_rows import QuantisedRows, norm_quantised
from gac.runtime.storage.modules import StoredLinear


class QuantisingNorm(Norm):
    """An RMSNorm that quantises its output too, and keeps that until all that read it so have done that.

    ``readers`` are stored matrices, whose kernels read the same 8-bit numbers; ``weights`` all that read the output, of
    which the readers are the first factors or themselves. Threads must not share such a model.
    """

    def __init__(self, norm: nn.Module, kind: str, readers: Sequence[StoredLinear], weights: Sequence[Any]) -> None:
        super().__init__(norm, kind)
        self._readers, self._keep_16_bit = tuple(readers), len(readers) < len(weights)
        self._hooked = norm, *weights, *readers
        self._output: Tensor | None = None
        self._quantised: QuantisedRows | None = None
        self._unread = 0
        for reader in readers:
            reader.before = self

    def __call__(self, hidden_states: Tensor) -> Tensor:
        x, weight = hidden_states, self.module.weight
        assert isinstance(weight, Tensor)
        if self.module.training or not self.can(x, weight):
            return super().__call__(x)
        storage = self._readers[0].storage
        how = storage.number, self._keep_16_bit, storage.block
        return self.put(*norm_quantised(x, weight, self._eps, self.kind, *how))

    def can(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether all readers have kernels for the norm of x, without gradients and hooks."""
        return (
            not torch.is_grad_enabled()
            and (weight.dtype, weight.device) == (x.dtype, x.device)
            and x.numel() > 0
            and not any(module._forward_hooks or module._forward_pre_hooks for module in self._hooked)
            and all(
                reader.storage.unsupported_reason(x.device, x.dtype, *reader.matrix) is None for reader in self._readers
            )
        )

    def put(self, output: Tensor, quantised: QuantisedRows) -> Tensor:
        """Keep both until all have read; return the output."""
        self._output, self._quantised, self._unread = output, quantised, len(self._readers)
        return output

    def get(self, x: Tensor) -> QuantisedRows | None:
        """Return what x was quantised to, if it is the last output."""
        return self._quantised if self._output is x else None

    def release(self) -> None:
        if self._unread:  # one of the readers has read
            self._unread -= 1
            if not self._unread:
                self._output = self._quantised = None


def quantise_in_norms(model: nn.Module, described: Sequence[Mapping[str, Any]]) -> None:
    """Let norms quantise what they make for the weights that read it; the model is changed in place.

    What is offloaded stays as it is, and so do norms that have no kernel, and those of readers of two kinds of numbers.
    """
    for item in described:
        norm, weights = model.get_submodule(item["by"]), [model.get_submodule(name) for name in item["readers"]]
        tensors = (tensor for part in (norm, *weights) for tensor in (*part.parameters(), *part.buffers()))
        kind = None if any(tensor.is_meta for tensor in tensors) else norm_of(norm)
        firsts = map(first_of, weights)
        readers = [first for first in firsts if isinstance(first, StoredLinear) and first.storage.number is not None]
        if kind is not None and len({(reader.storage.number, reader.storage.block) for reader in readers}) == 1:
            norm.forward = QuantisingNorm(norm, kind, readers, weights)
