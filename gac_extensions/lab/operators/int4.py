"""Linear layers with 4-bit weights in groups along k: PyTorch's fused kernel, and dequantise-then-multiply.

``W = (q - 8) * scale + zero`` with q in 0..15. A byte holds two neighbours along k, the earlier in its high half.
The layout of nibbles, scales and zeros is that of PyTorch's aten/src/ATen/native/cuda/int4mm.cu (2.6 to 2.13).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gac.profiling.operators.base import Axes, AxisSweep, Operand, Operator, corners, edges, indivisible

if TYPE_CHECKING:
    from torch import Tensor

GROUPS = (32, 64, 128, 256)

_INNER_TILES = (8, 4, 2)  # of 16 along k, that the fused kernel loads at once: 8 (16 bytes a lane) if they divide k
_TILE = 16
_OFFSET = 8
_ROWS = {*range(1, 33), *range(40, 129, 8), *range(192, 513, 64)}  # where fusing stops being faster


def partial_group(axes: Axes) -> str | None:
    """Say that k is not whole bytes and groups, so that there is no such weight; None where it is."""
    k, group = axes["k"], axes["group"]
    return f"k is cut into whole bytes and whole groups only: k = {k}, group = {group}" if k % 2 or k % group else None


class Int4Linear(Operator):
    """``x[m, k] @ W[n, k].T`` with 4-bit W, unpacked inside PyTorch's fused kernel (``torch._weight_int4pack_mm``).

    Inputs are x, the packed weight ``uint8[n, k / 2]``, and scales with zeros ``bf16[k / group, n, 2]``. The weights
    are packed before the launch; the raw nibbles stay among the operands for the check.
    """

    name = "int4_linear"
    axes = ("m", "k", "n", "group")
    dtypes = ("bf16",)
    writes: tuple[str, ...] = ("m n",)
    products = ("m k n",)
    gemm_sides = {"k": "k", "n": "n"}  # noqa: RUF012
    general = (
        AxisSweep("m", _ROWS, {"k": 4096, "n": 4096, "group": 128}, "bf16"),
        AxisSweep("n", range(64, 4097, 64), {"m": 1, "k": 4096, "group": 128}, "bf16"),
    )
    cublas = False
    fused = True

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, k, n, group = (axes[name] for name in self.axes)
        nibbles, scales = Operand((n, -(-k // 2)), "uint8"), Operand((-(-k // group), n, 2), dtype)
        return Operand((m, k), dtype), nibbles, scales

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        if axes["group"] not in GROUPS:
            return f"torch._weight_int4pack_mm takes groups of 32, 64, 128 or 256 only: group = {axes['group']}"
        if broken := partial_group(axes):
            return broken
        if broken := indivisible(axes, ("n",), 8):
            return f"torch._weight_int4pack_mm takes n that is a multiple of 8 only (its tile): {broken}"
        return None

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], "Tensor"]) -> Sequence["Tensor"]:
        """Make x, nibbles, scales and the packed weight; part of a group is refused as PyTorch refuses it."""
        import torch

        if reason := partial_group(axes):
            raise RuntimeError(reason)
        x, nibbles, scales = super().operands(axes, dtype, cut)
        if not self.fused:
            return [x, nibbles, scales]
        inner = next((tiles for tiles in _INNER_TILES if axes["k"] % (tiles * _TILE) == 0), _INNER_TILES[-1])
        return [x, nibbles, scales, torch._convert_weight_to_int4pack(nibbles, inner)]

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        import torch

        x, _, scales, packed = inputs
        return [torch._weight_int4pack_mm(x, packed, x.shape[1] // len(scales), scales)]

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        import torch

        x, nibbles, scales, *_ = inputs
        rows, columns = (edges(len(operand), x.device) for operand in (x, nibbles))
        levels = torch.stack([nibbles[columns] >> 4, nibbles[columns] & 15], dim=-1).flatten(1).float()
        by_row = scales[:, columns].float().transpose(0, 1)
        weight = (levels.view(len(columns), len(scales), -1) - _OFFSET) * by_row[..., :1] + by_row[..., 1:]
        return corners(result[0]), x[rows].float() @ weight.flatten(1).t()


class DequantisedInt4Linear(Int4Linear):
    """The same in two literal steps: W is written out in the dtype of x, then multiplied.

    It writes W, then the result; W counts once among the bytes.
    """

    name = "int4_linear_dequantised"
    writes = ("n k", "m n")
    cublas = True
    fused = False

    def refusal(self, axes: Axes, dtype: str) -> str | None:
        return partial_group(axes)

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        import torch

        (x, nibbles, scales), (weight, result) = inputs, outputs
        pairs = weight.view(*nibbles.shape, 2)
        pairs[..., 0].copy_(nibbles >> 4)
        pairs[..., 1].copy_(nibbles & 15)
        groups = weight.view(len(weight), len(scales), -1).sub_(_OFFSET)
        by_row = scales.transpose(0, 1)
        torch.addcmul(by_row[..., 1:], groups, by_row[..., :1], out=groups)
        return [torch.mm(x, weight.t(), out=result)]
