"""Bytes fetched against bytes used: what the alignment of a matrix's rows costs on the way through the caches.

Memory is read in sectors of 32 bytes, four to a cache line, and a thread loads at most 16 bytes at once (CUDA C++ Best
Practices Guide, "Coalesced Access to Global Memory"; CUDA C++ Programming Guide, "Device Memory Accesses").
"""

from collections import Counter
from math import gcd

SECTOR = 32
LINE = 128
VECTOR = 16
BANKS = 32
BANK_BYTES = 4

RESERVED = 1024
"""Bytes of an SM's shared memory that the system keeps for itself for every CTA (compute capability 8.0 and later)."""


def row_alignment(row_bytes: int) -> int:
    """The largest power of two, up to a cache line, at whose multiples every row of a packed matrix begins."""
    return min(row_bytes & -row_bytes, LINE)


def vector_bytes(row_bytes: int) -> int:
    """The widest load (16, 8, 4, 2 or 1 bytes) that is aligned in every row."""
    return min(row_alignment(row_bytes), VECTOR)


def fetched_over_used(row_bytes: int) -> float:
    """Bytes of the sectors touched over bytes used, when rows are read on their own, averaged over the rows.

    Args:
        row_bytes: length of a row and distance from one row to the next.
    """
    return SECTOR * _touched(row_bytes, row_bytes, SECTOR) / row_bytes


def lines_touched(row_bytes: int) -> float:
    """Cache lines that the 128 bytes at the beginning of a row lie on, averaged over the rows."""
    return _touched(row_bytes, LINE, LINE)


def _touched(stride: int, length: int, unit: int) -> float:
    step = gcd(stride, unit)
    starts = range(0, unit, step)
    return sum(-(-(start + length) // unit) for start in starts) / len(starts)


def bank_conflicts(stride_bytes: int) -> int:
    """How many passes it takes to read 16 bytes of each of eight rows in shared memory; 1: no conflict.

    Eight rows of 16 bytes are what ``ldmatrix`` reads at once. There are 32 banks of 4 bytes (CUDA C++ Programming
    Guide, "Shared Memory"). The rows are taken as they lie, without the swizzling by which libraries avoid conflicts.
    """
    firsts = [row * stride_bytes // BANK_BYTES for row in range(8)]
    words = {word for first in firsts for word in range(first, first + VECTOR // BANK_BYTES)}
    return max(Counter(word % BANKS for word in words).values())
