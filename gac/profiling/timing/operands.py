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


class Pool:
    """One large buffer of one dtype. Views that are cut from it follow one another, 256-byte aligned, and wrap around.

    So the next view is the one that has been out of use the longest.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._step = _ALIGNMENT // buffer.element_size()
        self._next = 0

    @classmethod
    def random(cls, elements: int, dtype: torch.dtype, device: str, seed: int = 0) -> "Pool":
        """Make a pool of random values, never zeros, which run faster.

        Floating point: normal of standard deviation 0.5, so that fp16 does not overflow; integers: random bits.
        """
        generator = torch.Generator(device).manual_seed(seed)
        buffer = torch.empty(elements, dtype=dtype, device=device)
        if not dtype.is_floating_point:
            least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            return cls(buffer.random_(least, most + 1, generator=generator))
        if dtype.itemsize > 1:
            return cls(buffer.normal_(0.0, _DEVIATION, generator=generator))
        for chunk in torch.split(buffer, _CHUNK):  # PyTorch draws no fp8: draw bf16 and cast, a chunk at a time
            drawn = torch.empty(chunk.shape, dtype=torch.bfloat16, device=device)
            chunk.copy_(drawn.normal_(0.0, _DEVIATION, generator=generator))
        return cls(buffer)

    def cut(self, shape: tuple[int, ...]) -> Tensor:
        """Return the next contiguous view of this shape; RuntimeError where the pool is smaller."""
        size, capacity = math.prod(shape), self._buffer.numel()
        if size > capacity:
            needed, available = (count * self._buffer.element_size() / _GIB for count in (size, capacity))
            raise RuntimeError(
                f"an operand of {needed:.2f} GiB does not fit the {available:.2f} GiB set aside for operands"
            )
        if self._next + size > capacity:
            self._next = 0
        view = self._buffer[self._next : self._next + size].view(shape)
        self._next += -(-size // self._step) * self._step
        return view


class Pools:
    """Operands of any dtype: for each dtype a pool to read from and one to write to, made when needed.

    Integers of all sizes are random bits, cut from one pool of words. Every pool has ``limit_bytes``.
    """

    def __init__(self, device: str, limit_bytes: int) -> None:
        self._device, self._limit_bytes = device, limit_bytes
        self._pools: dict[tuple[str, bool], Pool] = {}

    def cut(self, operand: Operand) -> Tensor:
        """Return the next view for an operand that is read: random values."""
        dtype = DTYPES[operand.dtype]
        if dtype.is_floating_point:
            return self._pool(operand.dtype, read=True).cut(operand.shape)
        words = self._pool(_WORD, read=True).cut((-(-operand.bytes // DTYPES[_WORD].itemsize),))
        return words.view(dtype)[: math.prod(operand.shape)].view(operand.shape)

    def cut_output(self, operand: Operand) -> Tensor:
        """Return the next view for an operand that is written: NaN (or 0), or earlier results."""
        return self._pool(operand.dtype, read=False).cut(operand.shape)

    def _pool(self, name: str, read: bool) -> Pool:
        if (name, read) not in self._pools:
            dtype = DTYPES[name]
            elements, unwritten = self._limit_bytes // dtype.itemsize, math.nan if dtype.is_floating_point else 0
            if read:
                self._pools[name, read] = Pool.random(elements, dtype, self._device)
            else:
                self._pools[name, read] = Pool(torch.full((elements,), unwritten, dtype=dtype, device=self._device))
        return self._pools[name, read]
