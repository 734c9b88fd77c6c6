"""Sizes that kernels can read. Loads no torch, so that planning reads it too."""

from collections.abc import Mapping

FEW_BITS = (2, 3, 4, 8)
STEP = 16
"""Of what rows and columns of weights of 8 bits are multiples: so PyTorch's FP8 GEMM wants it, and vLLM's of either."""
_WORDS = 32  # columns come in whole words, of 3 bits in three
LEAST_GROUP = 64  # columns of the smallest group
_WIDEST = 2**16  # a program holds a row
ALIGNED = 8  # of what ranks of latents and lengths of heads are multiples: 16 bytes are read at a time
LARGEST_HEAD = 256
LARGEST_RANK = 512


def few_bits(rows: int, columns: int, bits: int, group: int | None, zero: bool) -> str | None:
    """Return why the kernels cannot read a weight of ``gac.runtime.storage.packed``; None where they can."""
    if bits not in FEW_BITS:
        return f"numbers have {bits} bits, not {', '.join(map(str, FEW_BITS))}"
    if columns % _WORDS or not columns:
        return f"a weight has {columns} columns, no multiple of {_WORDS}"
    if group is None or (group >= columns and not zero):
        return "zero points of whole rows" if zero else None
    if group < LEAST_GROUP or group & group - 1:
        return f"groups have {group} columns, no power of two from {LEAST_GROUP} on"
    return None


def no_kernel(rows: int, columns: int, **options: object) -> str | None:
    """Return that no kernel reads a weight, whatever its size."""
    return "its storage has no kernel"


def eight_bits(rows: int, columns: int) -> str | None:
    """Return why no GPU has a GEMM for such a weight of ``gac.runtime.storage.eight_bits``; None where some do."""
    for size, side in ((rows, "rows"), (columns, "columns")):
        if size % STEP:
            return f"a weight has {size} {side}, no multiple of {STEP}"
    return None if 0 < columns <= _WIDEST else f"a weight has {columns} columns, not 1 to {_WIDEST}"


def latents(size: int, k_rank: int, v_rank: int) -> str | None:
    """Return why the kernel cannot attend over latents of such ranks, of heads of such a size; None where it can.

    A ``k_rank`` of 0: keys are read as they are. The ``v_rank`` of values that are read as they are is their length.
    """
    if size % ALIGNED or size > LARGEST_HEAD:
        return f"heads have {size} numbers, no multiple of {ALIGNED} up to {LARGEST_HEAD}"
    for rank in (k_rank, v_rank):
        if rank % ALIGNED:
            return f"latents have rank {rank}, no multiple of {ALIGNED}"
        if rank > LARGEST_RANK:
            return f"latents have rank {rank}, more than {LARGEST_RANK}"
    return None


# Latents of few bits in a cache: how many words of 16 bits they fill, by size alone. Loads no torch.

WORD = 16  # bits of a word, of which a cache is made: as many as a number of the models that are cached

LARGEST: Mapping[int, int] = {8: 127, 4: 7}
"""By the bits of a number its largest; numbers lie evenly on both sides of zero."""


def group_words(rank: int, bits: int) -> int:
    """Words that the numbers of one group fill, without their scale."""
    return -(-rank * bits // WORD)


def token_words(groups: int, rank: int, bits: int) -> int:
    """Words that a token fills, scales too.

    >>> token_words(2, 64, 8), token_words(2, 64, 4), token_words(1, 7, 4)
    (66, 34, 3)
    """
    return groups * (group_words(rank, bits) + 1)


# Keys and values of few bits in a cache (``gac.runtime.latents.rounded``).

BLOCK = 64
"""Tokens of a channel of keys, or channels of a token's values, that have one step."""
MOST_BITS = 8
EXACT = 128
"""The last tokens that a query reads as they are."""


def block_words(channels: int, bits: int, keys: bool) -> int:
    """Words that a block of tokens fills, with a middle and a step of 16 bits for each row of numbers.

    >>> block_words(192, 4, keys=True), block_words(192, 4, keys=False), block_words(96, 3, keys=False)
    (3456, 3456, 1280)
    """
    length = BLOCK if keys or channels % BLOCK == 0 else channels
    return BLOCK * channels // length * (group_words(length, bits) + 2)
