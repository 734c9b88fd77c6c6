"""Alignment classes: how even a dim is, as far as GPUs care."""

import numpy as np

from gac.core.arrays import Ints

COARSEST_CLASS = 64


def alignment_class(dims: Ints) -> Ints:
    """The largest power of two that divides each dim, at most 64."""
    classes: Ints = np.minimum(dims & -dims, COARSEST_CLASS)
    return classes


def class_name(step: int) -> str:
    """The name of an alignment class: ``odd``, ``8 x odd``."""
    return "odd" if step == 1 else f"{step} x odd"
