"""Stored matrices while they are trained: rounded as they are stored, with gradients as if they were not.

A float32 master stands for every number of a stored matrix. What runs is the nearest number of the grid that the scheme
has, with the scales of its groups; gradients pass through the rounding to the master (straight-through estimation,
arXiv 1308.3432), but where the master lies beyond the largest number, and to the scales (LSQ, arXiv 1902.08153). So
what is trained is what is stored in the end, to the bit.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gac.runtime.kernels.gpu import kernels_run_on
from gac.runtime.latents.quantise import quantise_latents
from gac.runtime.modules import multiply_blocks
from gac.runtime.plain.modeling_gac import Heads, in_parts
from gac.runtime.storage.eight_bits import READERS
from gac.runtime.storage.modules import StoredBlocks, StoredLinear, StoredValues
from gac.schemes import Scheme
from gac.schemes.grid import Grid
from gac.schemes.integers.grids import in_16_bits


class _Passed(torch.autograd.Function):
    """The second tensor, whose gradient is the first one's."""

    @staticmethod
    def forward(_ctx: Any, _exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _passed(exact: Tensor, rounded: Tensor) -> Tensor:
    found: Tensor = _Passed.apply(exact, rounded)  # type: ignore[no-untyped-call]
    return found


class StraightThrough(nn.Module):
    """What stands for a stored matrix while it is trained.

    ``weight`` ``(rows, columns)`` has the masters; ``factor`` ``(rows, groups)`` what the scales are multiplied by, if
    they are trained.

    Args:
        stored: the matrix, which is left alone until ``store``.
        scheme: what it is stored in.
        grid: what the scheme says of it.
    """

    scale: Tensor
    zero: Tensor

    def __init__(self, stored: StoredLinear, scheme: Scheme, grid: Grid) -> None:
        super().__init__()
        self._stored = (stored,)  # no submodule: its tensors are not trained
        self._scheme, self._grid = scheme, grid
        self.in_features, self.out_features = stored.in_features, stored.out_features
        self.weight = nn.Parameter(grid.values())
        self.factor = nn.Parameter(torch.ones_like(grid.scale)) if grid.rescales else None
        self.bias = stored.bias
        self.register_buffer("scale", grid.scale.contiguous(), persistent=False)  # goes where the model goes
        self.register_buffer("zero", grid.zero.contiguous(), persistent=False)
        self.train(stored.training)

    def forward(self, x: Tensor) -> Any:
        (stored,) = self._stored
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight = self._values(x.dtype).view(stored.shape)
        if isinstance(stored, StoredBlocks):
            return multiply_blocks(quantise_latents(x, len(weight), stored.bits), weight, self.bias)
        y = _read(self._scheme.reads, x, weight, self.bias)
        return Heads(y, stored.length) if isinstance(stored, StoredValues) else y

    @torch.no_grad()
    def store(self) -> StoredLinear:
        """The stored matrix, with what was trained in it."""
        (stored,) = self._stored
        numbers, scale = self._numbers()
        columns = self.weight.shape[1]
        found = Grid(numbers.flatten(1)[:, :columns], scale, self.zero, self._grid.size, self._grid.levels)
        stored.fill({name: one.contiguous() for name, one in self._scheme.on_grid(found).items()})
        return stored

    def _values(self, dtype: torch.dtype) -> Tensor:
        """What the matrix is as it is stored, ``(rows, columns)``."""
        levels, size = self._grid.levels, self._grid.size
        if kernels_run_on(self.weight.device) and not levels.floating:
            from gac.healing.rounding_kernel import Rounded

            grid = self._scale(), self.zero, size, levels.least, levels.most
            found: Tensor = Rounded.apply(self.weight, *grid, dtype)  # type: ignore[no-untyped-call]
            return found
        numbers, scale = self._numbers()
        values = (numbers - self.zero[..., None]) * scale[..., None]
        return values.flatten(1)[:, : self.weight.shape[1]].to(dtype)

    def _scale(self) -> Tensor:
        """The scales ``(rows, groups)``."""
        if self.factor is None:
            return self.scale
        exact = self.scale * self.factor
        return _passed(exact, in_16_bits(exact.detach()))

    def _numbers(self) -> tuple[Tensor, Tensor]:
        """The numbers of the grid ``(rows, groups, size)``, and the scales ``(rows, groups)``."""
        levels, scale = self._grid.levels, self._scale()
        units = in_parts(self.weight, self._grid.size) / scale[..., None] + self.zero[..., None]
        within = units.clamp(levels.least, levels.most)
        return _passed(within, levels.nearest_(within.detach().clone())), scale


def _read(reader: str | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product as it runs, with inputs that are rounded too where the scheme has a reader."""
    if reader is None:
        return functional.linear(x, weight, bias)
    with torch.no_grad():
        numbers, scale = READERS[reader](x)
    y = (functional.linear(_passed((x / scale).to(x.dtype), numbers), weight) * scale).to(x.dtype)
    return y if bias is None else y + bias
