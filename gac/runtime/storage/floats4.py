"""4-bit floating point, two numbers in a byte, as compressed-tensors' ``nvfp4-pack-quantized`` and ``mxfp4`` have it.

The float32 scale of NVFP4 is stored for each row, the same for all rows of a matrix, so that matrices can be joined.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm

import torch
from torch import Tensor

from gac.runtime.plain import modeling_gac
from gac.runtime.storage.base import Storage, Tensors, not_scales

_LEAST = 2.0**-126  # the smallest number in float32 with all of its digits, and a reciprocal


@dataclass(frozen=True)
class Floats4(modeling_gac.Floats4, Storage):
    """Groups of ``group`` columns have one scale; ``power``: a power of two."""

    def flaw(self, tensors: Tensors, rows: int, columns: int) -> str | None:
        scales = {name: tensor.float() for name, tensor in tensors.items() if name != "weight_packed"}
        if self.power:  # 255 stands for no number
            scales["weight_scale"] = torch.exp2(scales["weight_scale"] - 127)
        return next(filter(None, (not_scales(scales, name) for name in scales)), None)

    def can_slice_columns(self, columns: slice, total: int) -> bool:
        return all(end % lcm(2, self.group) == 0 for end in (columns.start, columns.stop))

    def slice_columns(self, tensors: Tensors, columns: slice, total: int) -> dict[str, Tensor]:
        size = {"weight_packed": 2, "weight_scale": self.group}
        return {
            name: tensor[:, columns.start // size[name] : columns.stop // size[name]] if name in size else tensor
            for name, tensor in tensors.items()
        }

    @property
    def is_exported_as_stored(self) -> bool:
        return self.power

    def exported(self, matrices: Sequence[Tensors]) -> list[dict[str, Tensor]]:
        """As stored; of NVFP4 with one number for all, by which scales are divided: vLLM joins matrices of a block."""
        if self.power:
            return super().exported(matrices)
        units = [tensors["weight_global_scale"] for tensors in matrices]
        unit = max(_LEAST, *(float(numbers.max()) for numbers in units))
        result = []
        for tensors, stored in zip(matrices, units, strict=True):
            scale = (tensors["weight_scale"].float() * (stored / unit)).to(torch.float8_e4m3fn)
            moved = {**tensors, "weight_scale": scale, "weight_global_scale": torch.full_like(stored, unit)}
            (rows, half), read = tensors["weight_packed"].shape, partial(self.values, dtype=torch.float32)
            if not torch.equal(read(tensors, rows, 2 * half), read(moved, rows, 2 * half)):
                raise ValueError("scales of NVFP4 further apart than e4m3 reaches")
            result.append(moved | {"weight_global_scale": stored.new_tensor([1 / unit])})
        return result

    def rows(self, tensors: Tensors, which: Tensor | slice, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        some = {name: tensor[which] for name, tensor in tensors.items()}
        return self.values(some, len(some["weight_packed"]), columns, dtype)
