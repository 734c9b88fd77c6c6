"""8 bits on both sides: a scale for each row of a weight and each token, or for parts of them. Imports no torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from gac.core.operations import Operation
from gac.runtime.limits import STEP, eight_bits
from gac.schemes.base import Scheme, StorageSpec, config_arguments, config_group, storage_of
from gac.schemes.integers import W8A16

if TYPE_CHECKING:
    from torch import Tensor

    from gac.schemes.feedback.levels import Levels
    from gac.schemes.matrices import Grid

_SCALE_BYTES, _BLOCK_SCALE_BYTES = 2, 4
_LARGEST_INTEGER, _LARGEST_FLOAT = 127, 448
_RELATIVE = 7.0e-4
"""Mean squared error of a normal floating-point number, over its mean square. A number in [1, 2) moves by up to 1/16,
evenly: by a variance of 1/768. Over its square that is 1/768 * 3 / (8 ln 2) where mantissas are spread as logarithms
are."""
_SUBNORMAL = 2**-18 / 12
"""That of numbers below 2^-6, which are a multiple of 2^-9."""


class EightBits(Scheme):
    """8-bit weights with a 16-bit scale for each row, 8-bit inputs with a 32-bit scale for each token.

    Attributes:
        kind: of the numbers in compressed-tensors, ``int`` or ``float``.
    """

    bits = 8
    kind: ClassVar[str]
    shape_requirement = f"rows and columns that are multiples of {STEP}, and no batched GEMM"

    def supports(self, gemm: Operation) -> bool:
        axes = gemm.axes
        return "b" not in axes and not axes["k"] % STEP and not axes["n"] % STEP

    def bytes(self, rows: int, columns: int) -> int:
        return rows * (columns + _SCALE_BYTES) if columns else 0

    def config_group(self, columns: int) -> dict[str, Any] | None:
        weights, inputs = (config_arguments(self.bits, self.kind, strategy) for strategy in ("channel", "token"))
        return config_group(f"{self.kind}-quantized", weights, inputs)


class Int8(EightBits):
    """Integers quantised as in ``w8a16``, a byte each: ``scale * number``, symmetric."""

    name = "w8a8"
    dtype = "w8a8"
    input_quantiser = "int8"
    input_dtype = "int8"
    kind = "int"
    largest = W8A16.largest
    storage = StorageSpec("Integers8", {}, eight_bits)

    def levels(self) -> "Levels":
        from gac.schemes.integers.levels import IntegerLevels

        return IntegerLevels(255, zero=False)

    def grid(self, tensors: "Mapping[str, Tensor]", rows: int, columns: int) -> "Grid":
        import torch

        from gac.schemes.matrices import Grid

        scale = tensors["weight_scale"].float()
        zero = torch.full_like(scale, 128)
        return Grid(tensors["weight"].float() + 128, scale, zero, max(columns, 1), self.levels())

    def on_grid(self, grid: "Grid") -> "dict[str, Tensor]":
        import torch

        return {"weight": grid.signed.to(torch.int8), "weight_scale": grid.scale.half()}

    def noise(self, squares: "Tensor", peak: "Tensor") -> "Tensor":
        """Uniform within a step of 1/127 of the token's largest, which is exact; at most the feature's square."""
        return (peak / (12 * _LARGEST_INTEGER**2)).minimum(squares)


class Float8(EightBits):
    """Floating point: ``scale * number``, both sides scaled to use the whole range.

    A number has a sign, 4 bits of exponent and 3 of mantissa (e4m3, arXiv 2209.05433), a scale of a row is in bfloat16.
    """

    name = "fp8"
    dtype = "fp8_dynamic"  # fp8 alone are GEMMs of quantised inputs
    input_quantiser = "float8"
    input_dtype = "fp8"
    kind = "float"
    storage = StorageSpec("Floats8", {}, eight_bits)

    def levels(self) -> "Levels":
        from gac.schemes.eight_bits.float8 import Float8Levels

        return Float8Levels()

    def grid(self, tensors: "Mapping[str, Tensor]", rows: int, columns: int) -> "Grid":
        import torch

        from gac.schemes.matrices import Grid

        scale, size = tensors["weight_scale"].float().repeat_interleave(self.height, 0)[:rows], self.group or columns
        return Grid(tensors["weight"].float(), scale, torch.zeros_like(scale), max(size, 1), self.levels())

    def on_grid(self, grid: "Grid") -> "dict[str, Tensor]":
        storage: Any = storage_of(self)
        scale = grid.scale[:: self.height].to(storage.scale)
        return {"weight": grid.numbers.to(storage.number), "weight_scale": scale.contiguous()}

    def noise(self, squares: "Tensor", peak: "Tensor") -> "Tensor":
        """A fraction of each feature's square, whatever the others are; a token's largest is exact."""
        return (_RELATIVE * squares + _SUBNORMAL / _LARGEST_FLOAT**2 * peak).minimum(squares)


class Float8Blocks(Float8):
    """Floating point as in ``fp8``, with a scale for each block of 128 x 128 weights, as DeepSeek-V3 has it.

    Inputs are quantised in groups of 128 columns of each token (arXiv 2412.19437, section 3.3). Scales are in float32.
    The last block of a row or a column may have fewer numbers. The name is that of compressed-tensors' preset.
    """

    name = "fp8_block"
    dtype = "fp8_block"
    input_quantiser = "float8_groups"
    storage = StorageSpec("Floats8Blocks", {}, eight_bits)
    group: int = 128
    height = 128

    def bytes(self, rows: int, columns: int) -> int:
        blocks = -(-rows // self.height) * -(-columns // self.group)
        return rows * columns + blocks * _BLOCK_SCALE_BYTES

    def ragged(self, columns: int) -> int:
        return columns % self.group

    def config_group(self, columns: int) -> dict[str, Any] | None:
        if self.ragged(columns):  # other readers quantise inputs in whole groups only
            return None
        weights = config_arguments(self.bits, self.kind, "block") | {"block_structure": [self.height, self.group]}
        inputs = config_arguments(self.bits, self.kind, "group", self.group) | {"dynamic": True}
        return config_group("float-quantized", weights, inputs)
