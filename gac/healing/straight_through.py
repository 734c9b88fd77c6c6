"""Quantised matrices in training: quantised as they are stored, with straight-through gradients.

Every number of a stored matrix has a float32 master. The nearest level of the scheme's grid is what runs, so that what
is trained is bit for bit what is stored. Gradients pass the rounding to masters inside the range of the levels (arXiv
1308.3432) and to the scales (LSQ, arXiv 1902.08153).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gac.models.modules import autocast_dtype
from gac.runtime.kernels.gpu import kernels_run_on
from gac.runtime.latents.quantise import rounded_latents
from gac.runtime.plain.modeling_gac import Heads, in_parts, multiply_blocks
from gac.runtime.storage.eight_bits import READERS
from gac.runtime.storage.modules import StoredBlocks, StoredLinear, StoredValues
from gac.schemes import Scheme
from gac.schemes.feedback.levels import Levels
from gac.schemes.integers.grids import in_16_bits
from gac.schemes.matrices import Grid


class StraightThrough(nn.Module):
    """The trainable replacement of a stored matrix, which does not change before ``store``.

    ``weight`` ``(rows, columns)`` holds the masters; ``factor`` ``(rows, groups)`` multiplies the scales if these are
    trained.
    """

    scale: Tensor
    zero: Tensor

    def __init__(self, stored: StoredLinear, scheme: Scheme, grid: Grid) -> None:
        super().__init__()
        self._stored = (stored,)  # not a submodule: its tensors are not trained
        self._scheme, self._grid = scheme, grid
        self.in_features, self.out_features = stored.in_features, stored.out_features
        self.weight = nn.Parameter(grid.values())
        # Another scale of floating-point numbers is the same grid but for the smallest of them.
        self.factor = None if grid.levels.floating else nn.Parameter(torch.ones_like(grid.scale))
        self.bias = stored.bias
        self.register_buffer("scale", grid.scale.contiguous(), persistent=False)
        self.register_buffer("zero", grid.zero.contiguous(), persistent=False)
        self.train(stored.training)

    def forward(self, x: Tensor) -> Any:
        (stored,) = self._stored
        x = x.to(autocast_dtype(x))
        weight = self.quantized_weight(x.dtype).view(stored.shape)
        if isinstance(stored, StoredBlocks):
            return multiply_blocks(rounded_latents(x, len(weight), stored.bits), weight, self.bias)
        y = _linear(self._scheme.input_quantiser, x, weight, self.bias)
        return Heads(y, stored.length) if isinstance(stored, StoredValues) else y

    def quantized_weight(self, dtype: torch.dtype) -> Tensor:
        """The matrix as it is stored, ``(rows, columns)``."""
        grid = self._grid
        return fake_quantize(self.weight, self._scales(), self.zero, grid.size, grid.levels, dtype)

    @torch.no_grad()
    def store(self) -> StoredLinear:
        (stored,), grid, scales = self._stored, self._grid, self._scales()
        numbers = quantize(self.weight, scales, self.zero, grid.size, grid.levels).flatten(1)
        trained = Grid(numbers[:, : self.weight.shape[1]], scales, self.zero, grid.size, grid.levels)
        stored.fill({name: values.contiguous() for name, values in self._scheme.on_grid(trained).items()})
        return stored

    def _scales(self) -> Tensor:
        if self.factor is None:
            return self.scale
        exact = self.scale * self.factor
        return straight_through(exact, in_16_bits(exact.detach()))


def _linear(reader: str | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if reader is None:
        return functional.linear(x, weight, bias)
    with torch.no_grad():
        numbers, scale = READERS[reader](x)
    y = (functional.linear(straight_through((x / scale).to(x.dtype), numbers), weight) * scale).to(x.dtype)
    return y if bias is None else y + bias


def fake_quantize(
    master: Tensor, scale: Tensor, zero: Tensor, group_size: int, levels: Levels, dtype: torch.dtype
) -> Tensor:
    """Quantise and dequantise a matrix ``(rows, columns)``, with straight-through gradients.

    ``master`` is float32 ``(rows, columns)``, ``scale`` and ``zero`` are float32 ``(rows, groups)``; gradients reach
    master and scale. The last group may have fewer columns.
    """
    if kernels_run_on(master.device) and not levels.floating:
        from gac.healing.triton_kernels import FakeQuantize

        values: Tensor = FakeQuantize.apply(master, scale, zero, group_size, levels.least, levels.most, dtype)  # type: ignore[no-untyped-call]
        return values
    numbers = quantize(master, scale, zero, group_size, levels)
    return ((numbers - zero[..., None]) * scale[..., None]).flatten(1)[:, : master.shape[1]].to(dtype)


def quantize(master: Tensor, scale: Tensor, zero: Tensor, group_size: int, levels: Levels) -> Tensor:
    """The nearest levels ``(rows, groups, group_size)`` of master / scale + zero; they pass gradients to both."""
    units = in_parts(master, group_size) / scale[..., None] + zero[..., None]
    clamped = units.clamp(levels.least, levels.most)
    return straight_through(clamped, levels.nearest_(clamped.detach().clone()))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, _exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """The rounded values, with the gradient of the exact ones (straight-through estimation, arXiv 1308.3432)."""
    values: Tensor = _StraightThrough.apply(exact, rounded)  # type: ignore[no-untyped-call]
    return values
