"""Latents of few bits in a cache: how many words of 16 bits they fill, by size alone. Loads no torch.

A token has the numbers of each group of heads, group by group, each filled up with zeros to whole words. Behind them
lie the scales, a word for each group. So whatever a cache copies, it copies a token with its scales.
"""

from collections.abc import Mapping

WORD = 16
"""Bits of a word, of which a cache is made: as many as a number of the models that are cached."""

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
