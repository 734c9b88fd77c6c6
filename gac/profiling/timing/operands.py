"""Memory that operands are cut from, so that no shape has to fill its own."""

import math

import torch
from torch import Tensor

from gac.profiling.operators import Operand

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
    "int8": torch.int8,
    "uint8": torch.uint8,
}

_WORD = "int32"
_ALIGNMENT = 256
_DEVIATION = 0.5
_CHUNK = 2**26
_GIB = 2**30


def name_of(dtype: torch.dtype) -> str:
    """What operands call a dtype of PyTorch.

    Raises:
        RuntimeError: they have no name for it.
    """
    found = next((name for name, known in DTYPES.items() if known == dtype), None)
    if found is None:
        raise RuntimeError(f"a storage holds {dtype}, of which no operands are made; they are {', '.join(DTYPES)}")
    return found


class Pool:
    """One large buffer of one dtype that operands are cut from.

    Successive views follow one another, each 256-byte aligned, and wrap around at the end: the next view is the one
    that has been out of use the longest.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._step = _ALIGNMENT // buffer.element_size()
        self._next = 0

    @classmethod
    def random(cls, elements: int, dtype: torch.dtype, device: str, seed: int = 0) -> "Pool":
        """Random values, never zeros, which run faster.

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
        """The next contiguous view of this shape.

        Raises:
            RuntimeError: the whole pool is smaller.
        """
        size = math.prod(shape)
        if size > self._buffer.numel():
            needed, set_aside = (count * self._buffer.element_size() / _GIB for count in (size, self._buffer.numel()))
            raise RuntimeError(
                f"an operand of {needed:.2f} GiB does not fit the {set_aside:.2f} GiB set aside for operands"
            )
        if self._next + size > self._buffer.numel():
            self._next = 0
        view = self._buffer[self._next : self._next + size].view(shape)
        self._next += -(-size // self._step) * self._step
        return view


class Pools:
    """Hands out operands of any dtype: a pool a dtype for what is read, and one for what is written, made when needed.

    Whole numbers of all sizes are random bits, cut from one pool of words.

    Args:
        device: where the pools lie.
        limit_bytes: size of each pool.
    """

    def __init__(self, device: str, limit_bytes: int) -> None:
        self._device, self._limit_bytes = device, limit_bytes
        self._pools: dict[tuple[str, bool], Pool] = {}

    def cut(self, operand: Operand) -> Tensor:
        """The next contiguous view for an operand that is read: random values.

        Raises:
            RuntimeError: the operand is larger than the limit.
        """
        dtype = DTYPES[operand.dtype]
        if dtype.is_floating_point:
            return self._pool(operand.dtype, read=True).cut(operand.shape)
        words = self._pool(_WORD, read=True).cut((-(-operand.bytes // DTYPES[_WORD].itemsize),))
        return words.view(dtype)[: math.prod(operand.shape)].view(operand.shape)

    def cut_output(self, operand: Operand) -> Tensor:
        """The next contiguous view for an operand that is written: NaN (or 0), or what was written before.

        Raises:
            RuntimeError: the operand is larger than the limit.
        """
        return self._pool(operand.dtype, read=False).cut(operand.shape)

    def _pool(self, name: str, read: bool) -> Pool:
        if (name, read) not in self._pools:
            dtype = DTYPES[name]
            elements = self._limit_bytes // dtype.itemsize
            self._pools[name, read] = (
                Pool.random(elements, dtype, self._device)
                if read
                else Pool(torch.full((elements,), _unwritten(dtype), dtype=dtype, device=self._device))
            )
        return self._pools[name, read]


def _unwritten(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else 0
