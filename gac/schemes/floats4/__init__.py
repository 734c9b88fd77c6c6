"""Weights in 4-bit floating point (e2m1) with a scale for each group of columns, multiplied in 16 bits."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gac.runtime.limits import no_kernel
from gac.schemes.base import Scheme, StorageSpec, config_arguments, config_group, storage_of

if TYPE_CHECKING:
    from torch import Tensor

    from gac.schemes.feedback.order import Inputs
    from gac.schemes.matrices import Grid

_GLOBAL_BYTES = 4


class Floats4Weights(Scheme):
    """Numbers of 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and as many below zero. The last group may have fewer columns.

    The names are those of compressed-tensors' presets, in lower case. NVFP4 (arXiv 2509.25149) has groups of 16 columns
    with scales in e4m3, times a 32-bit number, here a power of two. MXFP4 (OCP Microscaling Formats 1.0) has groups of
    32 columns, and scales that are powers of two.

    Args:
        kind: of the formats, ``nvfp4`` or ``mxfp4``.
        power: scales are powers of two.
    """

    bits = 4
    group: int

    def __init__(self, kind: str, group: int, power: bool) -> None:
        self.kind, self.group, self.power = kind, group, power
        self.name = self.dtype = f"{kind}a16"
        self.storage = StorageSpec("Floats4", {"group": group, "power": power}, no_kernel)

    def bytes(self, rows: int, columns: int) -> int:
        if not columns:
            return 0
        groups = -(-columns // self.group)
        return rows * (-(-columns // 2) + groups + (0 if self.power else _GLOBAL_BYTES))

    def _quantise(self, matrix: "Tensor", inputs: "Inputs | None", gradients: "Tensor | None") -> "Grid":
        from gac.schemes.floats4.levels import levels_for
        from gac.schemes.matrices import quantise_matrix

        self.check_range(matrix)
        return quantise_matrix(matrix, inputs, levels_for(matrix, self.power), self.group, gradients)

    def config_group(self, columns: int) -> dict[str, Any] | None:
        if columns % self.group:
            return None
        strategy, scale = ("group", "uint8") if self.power else ("tensor_group", "float8_e4m3fn")
        weights = config_arguments(self.bits, "float", strategy, self.group) | {"scale_dtype": f"torch.{scale}"}
        return config_group(f"{self.kind}-pack-quantized", weights)

    def grid(self, tensors: "Mapping[str, Tensor]", rows: int, columns: int) -> "Grid":
        import torch

        from gac.schemes.floats4.levels import Float4Levels
        from gac.schemes.matrices import Grid

        storage: Any = storage_of(self)
        numbers, scale = storage.numbers_and_scale(tensors, columns)
        return Grid(numbers, scale, torch.zeros_like(scale), self.group, Float4Levels(self.power))

    def on_grid(self, grid: "Grid") -> "dict[str, Tensor]":
        from gac.schemes.floats4.levels import packed

        return packed(grid, self.power)


NVFP4A16 = Floats4Weights("nvfp4", 16, power=False)
MXFP4A16 = Floats4Weights("mxfp4", 32, power=True)
