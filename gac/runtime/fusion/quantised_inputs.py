"""Inputs of 8 bits that are rounded where they are made, in an RMSNorm.

A norm is read by several weights, and each would round its output again. So the norm rounds it, in the same kernel,
and remembers which tensor that was; weights that are called with this very tensor take the rounded one. The tensor
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


class QuantisedActivations:
    """The tensor that a module made last and what it was rounded to, until all that read it so have done that.

    Threads must not share such a model.

    Args:
        readers: stored matrices, whose kernels read the same 8-bit numbers.
        keep_16_bit: whether others read the tensor in 16 bits.
        seen: modules that write or read it, whose hooks would see it.
    """

    def __init__(self, readers: Sequence[StoredLinear], keep_16_bit: bool, seen: Sequence[nn.Module]) -> None:
        self._readers, self.keep_16_bit, self._seen = tuple(readers), keep_16_bit, (*seen, *readers)
        number = readers[0].storage.number
        assert number is not None
        self.number: torch.dtype = number
        self._made: Tensor | None = None
        self._rounded: QuantisedRows | None = None
        self._left = 0
        for reader in readers:
            reader.before = self

    def can(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether all readers have kernels for the norm of x, without gradients and hooks."""
        return (
            not torch.is_grad_enabled()
            and (weight.dtype, weight.device) == (x.dtype, x.device)
            and x.numel() > 0
            and not any(reader._forward_hooks or reader._forward_pre_hooks for reader in self._seen)
            and all(
                reader.storage.unsupported_reason(x.device, x.dtype, *reader.matrix) is None for reader in self._readers
            )
        )

    def put(self, made: Tensor, rounded: QuantisedRows) -> Tensor:
        """Remember both until all have read; what was made."""
        self._made, self._rounded, self._left = made, rounded, len(self._readers)
        return made

    def get(self, x: Tensor) -> QuantisedRows | None:
        """Return what x was rounded to, if it is the tensor that was made last."""
        return self._rounded if self._made is x else None

    def release(self) -> None:
        """One of the readers has read."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._made = self._rounded = None


class QuantisingNorm(Norm):
    """An RMSNorm that hands its output over rounded."""

    def __init__(self, activations: QuantisedActivations, norm: nn.Module, kind: str) -> None:
        super().__init__(norm, kind)
        self.activations = activations

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight, activations = self.module.weight, self.activations
        assert isinstance(weight, Tensor)
        if self.module.training or not activations.can(hidden_states, weight):
            return super().__call__(hidden_states)
        return activations.put(
            *norm_quantised(hidden_states, weight, self._eps, self.kind, activations.number, activations.keep_16_bit)
        )


def quantise_in_norms(model: nn.Module, described: Sequence[Mapping[str, Any]]) -> None:
    """Let norms round what they make for the weights that read it; the model is changed in place.

    What is offloaded stays as it is, and so do norms that have no kernel.

    Args:
        described: of each norm its name (``by``) and those of all weights that read its output (``readers``).
    """
    for item in described:
        norm, readers = model.get_submodule(item["by"]), [model.get_submodule(name) for name in item["readers"]]
        tensors = (tensor for part in (norm, *readers) for tensor in (*part.parameters(), *part.buffers()))
        kind = None if any(tensor.is_meta for tensor in tensors) else norm_of(norm)
        activations = None if kind is None else _activations_of(readers, norm)
        if kind is not None and activations is not None:
            norm.forward = QuantisingNorm(activations, norm, kind)


def _activations_of(weights: Sequence[nn.Module], by: nn.Module) -> QuantisedActivations | None:
    firsts = [first_of(weight) for weight in weights]
    readers = [weight for weight in firsts if isinstance(weight, StoredLinear) and weight.storage.number is not None]
    if len({weight.storage.number for weight in readers}) != 1:
        return None
    return QuantisedActivations(readers, len(readers) < len(weights), (by, *weights))
