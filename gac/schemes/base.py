"""The seam of schemes: bytes, operators, and quantisation of a weight. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, lcm
from typing import TYPE_CHECKING, Any, ClassVar

from gac.core.errors import ModelError
from gac.core.operations import Operation
from gac.models.sites import Weight

if TYPE_CHECKING:
    from torch import Tensor

    from gac.runtime.storage.base import Storage
    from gac.schemes.feedback.levels import Levels
    from gac.schemes.feedback.order import Inputs
    from gac.schemes.matrices import Grid

LARGEST_SCALE = 65280.0
"""The largest number that float16 and bfloat16 both hold."""
SMALLEST_SCALE = 2.0**-24
"""The smallest number above 0 in float16."""
_WORD = 32


@dataclass(frozen=True)
class StorageSpec:
    """A storage of matrices.

    Attributes:
        storage: its name in ``gac.runtime.storage.modules.STORAGES``.
        options: the arguments of its class.
        limit: why its kernels cannot read a matrix of so many rows and columns, with these options, or None where they
            can; None: nothing is known of it from sizes alone.
    """

    storage: str
    options: Mapping[str, int | bool | str | None]
    limit: Callable[..., str | None] | None = None


def config_group(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A group of compressed-tensors' ``config_groups`` without its targets; ``layout`` is the name of its format.

    ``weights`` and ``inputs`` are from ``config_arguments``; without the latter inputs are not quantised.
    """
    return {"format": layout, "weights": weights, "input_activations": inputs, "output_activations": None}


def config_arguments(
    bits: int, kind: str, strategy: str, group: int | None = None, symmetric: bool = True
) -> dict[str, Any]:
    """Arguments of a group for weights or inputs; ``kind`` of a number is ``int`` or ``float``.

    ``strategy`` is that of scales: ``channel`` (a row), ``block``, ``group``, ``tensor_group`` (with one more for the
    matrix), or ``token``, which are found as tokens come.
    """
    arguments = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy}
    return arguments | {"dynamic": strategy == "token", "group_size": group}


class Scheme:
    """A number format for the matrices of a weight.

    Attributes:
        name: as plans write it; of those that compressed-tensors has presets for, its name in lower case.
        dtype: its name in latency tables: of one with a storage a name that no other has, with the same parameter as
            ``name``; of others the dtype of the numbers in its modules.
        bits: of one number, scales and zero points apart.
        lossy: it quantises; if not, it keeps every number as it was loaded.
        for_embeddings: embedding and LM head can be stored so.
        storage: holds a quantised matrix, in memory and on disk, and multiplies with it; None: the modules of forms do,
            with the quantised numbers in the model's dtype.
        shape_requirement: of its operators on a weight's matrices, in words that follow "expected"; None: none.
        group: neighbouring columns of a row with one scale; None: all of them, or as its modules hold them.
        height: neighbouring rows that share their scales, from the first row on.
        largest: the largest number that can be stored, on both sides of zero; ``stored`` refuses larger ones.
        input_quantiser: of the inputs of a matrix, by name in ``runtime.storage.eight_bits.READERS``; None: inputs are
            not quantised.
        input_dtype: of quantised inputs, as latency tables call it.
    """

    name: str
    dtype: str
    bits: int
    lossy: ClassVar[bool] = True
    for_embeddings: bool = False
    storage: StorageSpec | None = None
    shape_requirement: ClassVar[str | None] = None
    group: int | None = None
    height: ClassVar[int] = 1
    largest: float = inf
    input_quantiser: ClassVar[str | None] = None
    input_dtype: ClassVar[str | None] = None

    def applies_to(self, weight: Weight) -> bool:
        """True for linear weights, and for routed experts that do not share a scale or a word; never for routers."""
        if not (self.lossy and weight.is_routed):
            return True
        rows = (weight.blocks - 1) * weight.expert_width, weight.in_features
        return self.storage is not None and weight.experts > 0 and not any(count % self.step for count in rows)

    @property
    def step(self) -> int:
        """Rows after which every tensor of its storage begins anew, as far as its numbers tell."""
        return lcm(lcm(self.bits, _WORD) // self.bits, self.height)

    def supports(self, gemm: Operation) -> bool:
        """True if there is an operator for this GEMM, whatever its rows; always without a ``shape_requirement``."""
        return True

    def kernel_unsupported_reason(self, rows: int, columns: int) -> str | None:
        """The reason why the kernels of its storage cannot read a matrix, so that plain PyTorch multiplies with it.

        None: they can, as far as its size tells; or there is no storage, or one without known limits.
        """
        if self.storage is None or self.storage.limit is None:
            return None
        return self.storage.limit(rows, columns, **self.storage.options)

    def ragged(self, columns: int) -> int:
        """Columns of the last group of a row if they do not fill it, else 0."""
        return 0 if self.group is None or self.group >= columns else columns % self.group

    def bytes(self, rows: int, columns: int) -> int:
        """Exact bytes of a stored matrix: all tensors of its storage but its ``metadata``."""
        return -(-rows * columns * self.bits // 8)

    def operation(self, operation: Operation) -> Operation:
        return operation

    def check_range(self, matrix: "Tensor", name: str = "a matrix") -> None:
        """Refuse numbers beyond ``largest``; ``name`` is that of the weight, for the error."""
        most = float(matrix.detach().abs().max()) if matrix.numel() else 0.0
        if most > self.largest:
            raise ModelError(
                f"{name} has numbers up to {most:.4g}, in scheme {self.name}",
                f"numbers up to {self.largest:.4g}, which its scales of 16 bits reach",
                f"Leave {self.name} out, or use a checkpoint with smaller weights.",
            )

    def quantised(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "Tensor":
        """The matrix ``(rows, columns)`` of a module's parameters after storing, in the same dtype.

        By default the numbers on ``levels``; without levels what the storage gives back of ``stored``. Schemes with
        neither override this.

        Args:
            inputs: of the product, for schemes that minimise its error; None if unknown.
            gradients: E[g g^T] of the gradients of the product, shape ``(rows, rows)``, where the errors of some rows
                can compensate those of others; None: rows are quantised one by one.
        """
        if (grid := self._quantise(matrix, inputs, gradients)) is not None:
            return grid.values().to(matrix.dtype)
        if (storage := storage_of(self)) is None:
            raise NotImplementedError(f"scheme {self.name} has no storage, and does not say how it quantises")
        rows, columns = matrix.shape
        return storage.values(self.stored(matrix, inputs, gradients), rows, columns, matrix.dtype)

    def stored(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "dict[str, Tensor]":
        """The tensors of its storage that hold the quantised matrix; for schemes with a storage."""
        if (grid := self._quantise(matrix, inputs, gradients)) is None:
            raise NotImplementedError(f"scheme {self.name} has a storage, and does not say what that holds")
        return self.on_grid(grid)

    def levels(self) -> "Levels | None":
        """The levels that ``quantised`` and ``stored`` round to, with error feedback; None: the scheme defines both."""
        return None

    def _quantise(self, matrix: "Tensor", inputs: "Inputs | None", gradients: "Tensor | None") -> "Grid | None":
        if (levels := self.levels()) is None:
            return None
        from gac.schemes.matrices import quantise_matrix

        self.check_range(matrix)
        return quantise_matrix(matrix, inputs, levels, self.group, gradients, self.height)

    def config_group(self, columns: int) -> dict[str, Any] | None:
        """The group of compressed-tensors' ``config_groups`` for a stored matrix, without its targets.

        None: there is none, and only GAC reads a matrix of so many columns.
        """
        return None

    def grid(self, tensors: "Mapping[str, Tensor]", rows: int, columns: int) -> "Grid | None":
        """Numbers and scales in tensors from ``stored`` as a grid on which training moves them; ``on_grid`` stores it.

        None: it has no grid, and healing leaves such weights as they are.
        """
        return None

    def on_grid(self, grid: "Grid") -> "dict[str, Tensor]":
        """The tensors of its storage for this grid, for schemes with grids."""
        raise NotImplementedError(f"scheme {self.name} has grids, and does not say how they are stored")

    def noise(self, squares: "Tensor", peak: "Tensor") -> "Tensor":
        """Mean squared error of each quantised input feature, ``(..., features)``, if features are independent.

        For schemes that quantise inputs, and inputs that no text has shown: the latents of a pair.

        Args:
            squares: E[x^2] of each feature x over the tokens in which it is not the largest, shape ``(features,)``.
            peak: E[max x^2] over the tokens, shape ``()`` or ``(..., 1)``.
        """
        raise NotImplementedError(f"scheme {self.name} quantises inputs, and does not say with what error")


def storage_of(scheme: Scheme) -> "Storage | None":
    """The storage of a scheme's matrices; None: the modules of forms hold them."""
    from gac.runtime.storage.modules import STORAGES  # loads torch

    return None if scheme.storage is None else STORAGES[scheme.storage.storage][0](**scheme.storage.options)


class Bf16(Scheme):
    """Every number as it was loaded, and counted as 16 bits."""

    name = "bf16"
    dtype = "bf16"
    bits = 16
    for_embeddings = True
    lossy = False

    def quantised(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "Tensor":
        return matrix
