"""The seam of storages: the tensors that hold a matrix instead of one in the model's dtype, and products with it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from gac.runtime.kernels.elementwise.rows import AddNorm
from gac.runtime.kernels.gpu import unsupported_reason, warn_slow_path_once
from gac.runtime.limits import no_kernel

Tensors = Mapping[str, Tensor]  # the tensors of one matrix, by name


def not_scales(tensors: Tensors, name: str) -> str | None:
    """Return the flaw of a tensor of scales of which some are negative, zero or not finite; None: it has none."""
    least, most = torch.aminmax(tensors[name])  # NaN, where there is one
    if least.item() > 0 and most.item() < inf:
        return None
    sound = tensors[name].isfinite() & (tensors[name] > 0)
    return f"{name} holds {int((~sound).sum())} numbers that are no scales; expected finite ones above 0"


class Storage(ABC):
    """A layout of matrices in tensors, of which it holds none; made from the options in ``config.json``.

    A new one derives from this in a file of this folder, and has a plain class of the same name in
    ``gac.runtime.plain.modeling_gac.STORAGES``, a dataclass whose fields are the options. That has ``tensors``,
    ``values`` and ``linear``, which are inherited here. One that quantises inputs has its own ``linear``; one with a
    kernel has ``kernel`` and ``kernel_unsupported_reason``, and where that reads quantised inputs ``number`` and
    ``kernel_of_prepared``.
    """

    metadata: ClassVar[frozenset[str]] = frozenset()  # tensors that hold nothing of the matrix, and are not counted
    number: Any = None  # dtype of quantised inputs; None: the kernel reads them in 16 bits
    block: Any = None  # columns of quantised inputs with one scale; None: all

    @abstractmethod
    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of every tensor that holds a matrix, by the name that it has beside the bias."""

    @abstractmethod
    def values(self, tensors: Tensors, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the matrix ``(rows, columns)`` that the tensors stand for."""

    def flaw(self, tensors: Tensors, rows: int, columns: int) -> str | None:
        """Return what no matrix ``(rows, columns)`` has, in words that begin with a tensor's name; None: nothing."""
        return None

    @property
    def is_exported_as_stored(self) -> bool:
        """Return whether compressed-tensors reads the tensors as they are."""
        return True

    def exported(self, matrices: Sequence[Tensors]) -> list[dict[str, Tensor]]:
        """Return the tensors of some matrices of a block as compressed-tensors has them, and engines that join them.

        A ValueError says if they cannot be written so that they stand for the same values.
        """
        return [dict(tensors) for tensors in matrices]

    @property
    def step(self) -> int:
        """Rows after which every tensor begins anew: ``slice_rows`` takes what starts at a multiple of them."""
        return 1

    def slice_rows(self, tensors: Tensors, rows: slice) -> dict[str, Tensor]:
        """Return views of the tensors that hold some rows of the matrix; none of ``metadata``."""
        return {name: tensor[rows] for name, tensor in tensors.items() if name not in self.metadata}

    def can_slice_columns(self, columns: slice, total: int) -> bool:
        """Return whether ``slice_columns`` can take some columns of a matrix with ``total`` columns."""
        return False

    def slice_columns(self, tensors: Tensors, columns: slice, total: int) -> dict[str, Tensor]:
        """Return views of the tensors that hold some columns of the matrix; none of ``metadata``."""
        raise NotImplementedError

    def metadata_for(self, rows: int, columns: int) -> dict[str, Tensor]:
        """Return the tensors of ``metadata`` for such a matrix."""
        return {}

    def rows(self, tensors: Tensors, which: Tensor | slice, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return some rows of the matrix, ``(some, columns)``; here of all its values."""
        return self.values(tensors, rows, columns, dtype)[which]

    def multiply(self, x: Tensor, tensors: Tensors, rows: int, columns: int, bias: Tensor | None) -> Tensor:
        """Return ``x @ matrix.T + bias`` for x ``(..., columns)``: by a kernel where one runs, else by ``linear``."""
        reason = self.unsupported_reason(x.device, x.dtype, rows, columns)
        if reason is None and x.numel() and not (x.requires_grad and torch.is_grad_enabled()):
            y = self.kernel(x, tensors, columns)
            return y if bias is None else y + bias
        if reason:
            warn_slow_path_once(x, reason)
        return self.linear(x, self.values(tensors, rows, columns, x.dtype), bias)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product with the values, in plain PyTorch on every device."""
        return functional.linear(x, weight, bias)

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> str | None:
        """Return why no kernel multiplies such a matrix with inputs of that dtype there; None where one does."""
        return unsupported_reason(device, dtype) or self.kernel_unsupported_reason(device, rows, columns)

    def kernel_unsupported_reason(self, device: torch.device, rows: int, columns: int) -> str | None:
        """Return why the storage's kernel cannot multiply with such a matrix on that GPU; None where it can."""
        return no_kernel(rows, columns)

    def kernel(self, x: Tensor, tensors: Tensors, columns: int) -> Tensor:
        """Return ``x @ matrix.T`` on a GPU that the kernel supports, of inputs that need no gradients."""
        raise NotImplementedError

    def gated_kernel(self, x: Tensor, tensors: Tensors, columns: int) -> Tensor | None:
        """Return ``(silu(gate) * up) @ matrix.T`` on such a GPU for x ``(rows, 2 columns)``, gate beside up.

        None where no launch for the inputs of the kernel holds the activation too.
        """
        return None

    def normed_inputs(self, x: Tensor, norm: AddNorm, tensors: Tensors, columns: int) -> Any:
        """Return a norm of x ``(rows, columns)`` as ``kernel_of_prepared`` reads it, in one launch.

        None where no such launch makes the inputs of the kernel, and the norm was not run.
        """
        return None

    def kernel_of_prepared(self, inputs: Any, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        """Return ``kernel`` of inputs that are quantised, or in order, already: ``(rows of x, rows)`` in that dtype."""
        raise NotImplementedError
