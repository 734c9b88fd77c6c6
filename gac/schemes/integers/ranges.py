"""Ranges of a group's values that are tried for its scale."""

import torch

NARROWED = torch.linspace(1, 0.5, 21, dtype=torch.float64).tolist()[1:]
"""Fractions of a group's range that are tried after all of it."""
SMALLEST_SCALE = 2.0**-24
"""The smallest number above 0 in float16."""


def range_fractions(most: int, zero: bool) -> list[float]:
    """Fractions of a group's range to try; the first wins where several are as good.

    With a zero point a range of one number more is tried too: a scale that was rounded up may leave one number without
    a value. So a quantised matrix is quantised to itself.
    """
    return [1.0, *([most / (most - 1)] if zero else []), *NARROWED]
