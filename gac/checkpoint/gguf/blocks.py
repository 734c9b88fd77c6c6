"""Blocks of 32 weights as llama.cpp lays them out: whole numbers of few bits and one scale in float16.

Of these types a weight is ``number * scale``, so whole numbers that fit are carried bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF.

    Attributes:
        least, most: the numbers that it holds.
        lay: from numbers, int16 ``(blocks, 32)``, to the bytes behind the scale, ``(blocks, bytes)``.
    """

    least: int
    most: int
    lay: Callable[[NDArray[np.int16]], Bytes]

    def encoded(self, numbers: NDArray[np.int16], scale: NDArray[np.float16]) -> Bytes:
        """The bytes of each row, ``(rows, bytes)``.

        Args:
            numbers: shape ``(rows, columns)``, columns a multiple of 32, all from ``least`` to ``most``.
            scale: of each block, shape ``(rows, columns / 32)``.
        """
        before = scale.astype("<f2").reshape(-1, 1).view(np.uint8)
        blocks = np.concatenate([before, self.lay(numbers.reshape(-1, BLOCK))], axis=1)
        return blocks.reshape(len(numbers), -1)


def _nibbles(numbers: NDArray[np.int16]) -> Bytes:
    """Two numbers of 4 bits a byte: the first 16 in the low halves, the others in the high ones."""
    first, second = np.hsplit(numbers, 2)
    return (first | second << 4).astype(np.uint8)


def _four_bits(numbers: NDArray[np.int16]) -> Bytes:
    return _nibbles(numbers + 8)


def _five_bits(numbers: NDArray[np.int16]) -> Bytes:
    """The fifth bits of a block first, 4 bytes, then the others."""
    shifted = numbers + 16
    fifth = np.packbits((shifted >> 4).astype(np.uint8), axis=1, bitorder="little")
    return np.concatenate([fifth, _nibbles(shifted & 15)], axis=1)


def _eight_bits(numbers: NDArray[np.int16]) -> Bytes:
    return numbers.astype(np.int8).view(np.uint8)


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "Q4_0": BlockType(-8, 7, _four_bits),
        "Q5_0": BlockType(-16, 15, _five_bits),
        "Q8_0": BlockType(-128, 127, _eight_bits),
    }
)
"""By the name that GGUF gives it, the smallest first."""


def smallest_type(least: int, most: int) -> str | None:
    """The smallest type that holds all whole numbers from ``least`` to ``most``; None where none does."""
    fits = (name for name, kind in BLOCK_TYPES.items() if kind.least <= least and most <= kind.most)
    return next(fits, None)
