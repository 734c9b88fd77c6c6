"""The seam of schemes: bytes, operators, and what rounding does to a weight. Imports no torch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from gac.core.errors import ModelError
from gac.core.operations import Operation
from gac.models.sites import Weight
from gac.runtime.limits import LIMITS

if TYPE_CHECKING:
    from torch import Tensor

    from gac.schemes.grid import Grid
    from gac.schemes.inputs import Inputs
    from gac.schemes.scaled import Scaled


@dataclass(frozen=True)
class StorageSpec:
    """What holds a matrix: the name of a storage in ``gac.runtime.storage``, and the options that make one."""

    storage: str
    options: Mapping[str, int | bool | str | None]


class Scheme(ABC):
    """A number format for the matrices of a weight.

    Attributes:
        name: as plans write it; of those that compressed-tensors has presets for, its name in lower case.
        dtype: what latency tables call it: of one that has a storage a name of its own, which ends in the parameter
            where its name does; of others the numbers that its modules hold.
        bits: of one number, scales and zero points apart.
        lossy: whether it rounds; one that does not keeps every number as it was loaded.
        storage: what holds a rounded matrix, in memory and on disk, and multiplies with it; None: the modules that
            forms are built as, with the rounded numbers in the model's dtype.
        needs: what its operators want of a weight's matrices, in words that follow "expected"; None: they take all.
        group: neighbouring columns of a row that have one scale; None: all of them, or as its modules hold them.
        largest: number that can be stored, on both sides of zero: its scales reach no further.
        reads: what rounds the inputs of a matrix before they are multiplied, by its name in
            ``gac.runtime.storage.eight_bits.READERS``; None: they are multiplied as they are.
    """

    name: str
    dtype: str
    bits: int
    lossy: ClassVar[bool] = True
    storage: StorageSpec | None = None
    needs: ClassVar[str | None] = None
    group: int | None = None
    largest: float = inf
    reads: ClassVar[str | None] = None

    def takes(self, weight: Weight) -> bool:
        """Whether the weight can be stored so."""
        return True

    def runs(self, gemm: Operation) -> bool:
        """Whether there is an operator for this GEMM of a weight, whatever its rows; all where it needs nothing."""
        return True

    def unread(self, rows: int, columns: int) -> str | None:
        """Why the kernels of its storage cannot read a matrix, which plain PyTorch then multiplies with.

        None: they can, as far as its size tells; or it has no storage, or one that says nothing of its kernels.
        """
        if self.storage is None or self.storage.storage not in LIMITS:
            return None
        return LIMITS[self.storage.storage](rows, columns, **self.storage.options)

    def ragged(self, columns: int) -> int:
        """Columns of the last group of a row where they do not fill it; 0 where every group is full."""
        return 0 if self.group is None or self.group >= columns else columns % self.group

    def bytes(self, rows: int, columns: int) -> int:
        """Exact bytes of a matrix where it is stored: all that its storage holds of it, but for its ``metadata``."""
        return -(-rows * columns * self.bits // 8)

    def operation(self, operation: Operation) -> Operation:
        """What runs instead of this operation of 16-bit weights."""
        return operation

    def check_range(self, matrix: "Tensor", name: str = "a matrix") -> None:
        """Refuse numbers beyond ``largest``.

        Args:
            name: of the weight that the matrix belongs to.

        Raises:
            ModelError: the matrix has such numbers.
        """
        most = float(matrix.detach().abs().max()) if matrix.numel() else 0.0
        if most > self.largest:
            raise ModelError(
                f"{name} has numbers up to {most:.4g}, in scheme {self.name}",
                f"numbers up to {self.largest:.4g}, which its scales of 16 bits reach",
                f"Leave {self.name} out, or use a checkpoint with smaller weights.",
            )

    @abstractmethod
    def rounded(self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None) -> "Tensor":
        """The matrix ``(rows, columns)`` of a module's parameters as it is after storing, in its own dtype.

        Args:
            inputs: what the matrix is multiplied with, for schemes that round so that the product changes least; None
                where that is not known.
            gradients: E[g g^T] of the gradients of the product, shape ``(rows, rows)``, where the errors of some rows
                can make up for those of others; None: rows are rounded by themselves.
        """

    def stored(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "dict[str, Tensor]":
        """The tensors of its storage that hold what ``rounded`` gives of the same; for schemes that have one."""
        raise NotImplementedError(f"scheme {self.name} has a storage, and does not say what that holds")

    def config_group(self, columns: int) -> dict[str, Any] | None:
        """What compressed-tensors' ``config_groups`` say of a stored matrix, without its targets.

        None: they cannot say it, and nothing but GAC reads such a matrix.

        Args:
            columns: of the matrix, for a scale may be for as many as do not divide them.
        """
        return None

    def scaled(self, values: "Tensor", held: "Mapping[str, Tensor]") -> "Scaled | None":
        """What its storage holds as whole numbers with scales, which other formats (GGUF) carry as they are.

        None where it holds no such numbers: other formats round the values again.

        Args:
            values: what the tensors stand for, float32, shape ``(rows, columns)``.
            held: the tensors, as ``stored`` gives them.
        """
        return None

    def grid(self, held: "Mapping[str, Tensor]", rows: int, columns: int) -> "Grid | None":
        """What its storage holds as numbers of a format, which training moves to others; ``on_grid`` stores those.

        None where it does not say: then healing leaves such weights as they are.

        Args:
            held: the tensors, as ``stored`` gives them.
        """
        return None

    def on_grid(self, grid: "Grid") -> "dict[str, Tensor]":
        """The tensors of its storage that hold this grid's numbers and scales, for schemes that have grids."""
        raise NotImplementedError(f"scheme {self.name} has grids, and does not say how they are stored")

    def noise(self, squares: "Tensor", peak: "Tensor") -> "Tensor":
        """The mean squared error that the reader makes of each feature, ``(..., features)``, if they are independent.

        Asked of schemes that round inputs, for inputs that no text has shown: the latents of a pair.

        Args:
            squares: E[x^2] of each feature x, without the tokens of which it is the largest, shape ``(features,)``.
            peak: E[max x^2] over the tokens, shape ``()`` or ``(..., 1)``.
        """
        raise NotImplementedError
