"""A rounded matrix as whole numbers and scales: what other formats of whole numbers can carry as it is."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scaled:
    """``number * scale``, numbers on both sides of zero.

    Attributes:
        numbers: int16, shape ``(rows, columns)``.
        scale: float16, shape ``(rows, groups)``.
        size: neighbouring columns that have one scale; the last group may have fewer.
    """

    numbers: Tensor
    scale: Tensor
    size: int

    @staticmethod
    def of(values: Tensor, scale: Tensor, size: int) -> "Scaled":
        """Of values ``(rows, columns)`` in float32, which are whole numbers times the scale of their group."""
        steps = scale.float().repeat_interleave(size, dim=1)[:, : values.shape[1]]
        return Scaled((values / steps).round().to(torch.int16), scale, size)
