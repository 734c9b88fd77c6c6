"""Memory that operands are cut from, so that no shape has to fill its own."""

import math

import torch
from torch import Tensor

from gac.profiling.operators.base import TORCH_NAMES, Operand

DTYPES = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}

_WORD = "int32"
_ALIGNMENT = 256
_DEVIATION = 0.5
_CHUNK = 2**26
_GIB = 2**30


class Pools:
    """Operands of any dtype: views of large buffers, for each dtype one to read from and one to write to.

    Views that are cut from a buffer follow one another, 256-byte aligned, and wrap around: the next view is the one
    that has been out of use the longest. Integers of all sizes are random bits, cut from one buffer of words. Every
    buffer has ``limit_bytes``, and is made when needed.
    """

    def __init__(self, device: str, limit_bytes: int) -> None:
        self._device, self._limit_bytes = device, limit_bytes
        self._buffers: dict[tuple[str, bool], Tensor] = {}
        self._next: dict[tuple[str, bool], int] = {}

    def cut(self, operand: Operand) -> Tensor:
        dtype = DTYPES[operand.dtype]
        if dtype.is_floating_point:
            return self._view(operand.dtype, operand.shape, read=True)
        words = self._view(_WORD, (-(-operand.bytes // DTYPES[_WORD].itemsize),), read=True)
        return words.view(dtype)[: math.prod(operand.shape)].view(operand.shape)

    def cut_output(self, operand: Operand) -> Tensor:
        """Return the next view for an operand that is written: NaN (or 0), or earlier results."""
        return self._view(operand.dtype, operand.shape, read=False)

    def _view(self, name: str, shape: tuple[int, ...], read: bool) -> Tensor:
        key, dtype = (name, read), DTYPES[name]
        size, capacity = math.prod(shape), self._limit_bytes // dtype.itemsize
        if size > capacity:
            needed, available = (count * dtype.itemsize / _GIB for count in (size, capacity))
            raise RuntimeError(
                f"an operand of {needed:.2f} GiB does not fit the {available:.2f} GiB set aside for operands"
            )
        if key not in self._buffers and read:
            self._buffers[key] = random_numbers(capacity, dtype, self._device)
        elif key not in self._buffers:
            unwritten = math.nan if dtype.is_floating_point else 0
            self._buffers[key] = torch.full((capacity,), unwritten, dtype=dtype, device=self._device)
        start = self._next.get(key, 0)
        if start + size > capacity:
            start = 0
        step = _ALIGNMENT // dtype.itemsize
        self._next[key] = start + -(-size // step) * step
        return self._buffers[key][start : start + size].view(shape)


def random_numbers(count: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Draw random values, never zeros, which run faster.

    Floating point: normal of standard deviation 0.5, so that fp16 does not overflow; integers: random bits.
    """
    generator = torch.Generator(device).manual_seed(seed)
    buffer = torch.empty(count, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return buffer.random_(least, most + 1, generator=generator)
    if dtype.itemsize > 1:
        return buffer.normal_(0.0, _DEVIATION, generator=generator)
    for chunk in torch.split(buffer, _CHUNK):  # PyTorch draws no fp8: draw bf16 and cast, a chunk at a time
        drawn = torch.empty(chunk.shape, dtype=torch.bfloat16, device=device)
        chunk.copy_(drawn.normal_(0.0, _DEVIATION, generator=generator))
    return buffer
