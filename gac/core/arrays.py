"""Arrays of the planner by dtype, and the alignment of dims."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

COARSEST_CLASS = 64  # GPUs do not distinguish alignments beyond multiples of this


def alignment_class(dims: Ints) -> Ints:
    """Return the largest power of two that divides each dim, at most 64."""
    classes: Ints = np.minimum(dims & -dims, COARSEST_CLASS)
    return classes


def class_name(step: int) -> str:
    return "odd" if step == 1 else f"{step} x odd"
