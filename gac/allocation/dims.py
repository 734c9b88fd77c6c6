"""The dims that a form may take of a weight: aligned, sound and run by the scheme's operators."""

from collections.abc import Sequence
from functools import partial
from math import lcm

import numpy as np

from gac.allocation.latencies import Timing
from gac.arrays import Ints
from gac.forms import Form, form_named
from gac.models.sites import Site, Weight
from gac.schemes import Scheme


def step_of(form: Form, align: bool | int) -> int:
    """What the dims of a form are multiples of, whatever the profile says of them."""
    return lcm(form.step, int(align)) if align and not form.pieces else 1


def first_dim(form: Form, align: bool | int) -> int:
    """The smallest dim of a form, whatever the profile says of it."""
    return step_of(form, align) if form.least else 0


def full_dim(weight: Weight) -> Ints:
    """The only dim of a dense weight."""
    return np.array([form_named("dense").full(weight)])


def dims_up_to(
    largest: int, site: Site, form: Form, scheme: Scheme, taken: Sequence[int], align: bool | int, timing: Timing
) -> Ints:
    """The dims up to the largest that the scheme allows; of those the aligned and sound ones where asked for.

    Args:
        taken: positions of the weights that take the form together.
        align: as ``Space.align`` has it.
    """
    dims = np.arange(first_dim(form, align), largest + 1, step_of(form, align), dtype=np.int64)
    if align and timing.profile is not None:
        for at in taken:
            weight, fused = site.weights[at], at in site.fused
            sound = partial(timing.sound, form, weight, dims, fused, scheme)
            dims = dims[timing.once(("sound", form.name, scheme.name, fused, dims.tobytes()), weight, sound)]
    return that_run(form, scheme, [site.weights[at] for at in taken], dims)


def that_run(form: Form, scheme: Scheme, weights: Sequence[Weight], dims: Ints) -> Ints:
    """Those of the dims at which the scheme has an operator for every GEMM of these weights."""
    if not all(map(scheme.takes, weights)):
        return dims[:0]
    if scheme.needs is None:
        return dims
    gemms = [[one for weight in weights for one in form.gemms(weight, dim, 1)] for dim in dims.tolist()]
    return dims[np.array([all(map(scheme.runs, of_dim)) for of_dim in gemms], dtype=np.bool_)]
