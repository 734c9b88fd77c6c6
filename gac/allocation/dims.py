"""The dims that a form may take of a weight: aligned, sound and run by the scheme's operators."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import lcm

import numpy as np
from numpy.typing import NDArray

from gac.allocation.latencies import Timing
from gac.core.arrays import Ints
from gac.core.errors import PlanError
from gac.forms import DENSE, Form, form_named, variants_of
from gac.forms.tensor_parallel import divides, moved_axes, split_gemms
from gac.models.sites import Site, Weight
from gac.plan.recipe import Space
from gac.schemes import Scheme, scheme_named


def step_of(form: Form, align: bool | int) -> int:
    """What the dims of a form are multiples of, whatever the profile says of them."""
    return lcm(form.step, int(align)) if align and not form.dim_counts_units else 1


def plain_dims(form: Form, align: bool | int, largest: int) -> Ints:
    """The dims of a form up to the largest, whatever the profile says of them."""
    step = step_of(form, align)
    return np.arange(step if form.min_dim else 0, largest + 1, step, dtype=np.int64)


def first_dim(form: Form, weight: Weight, scheme: Scheme, align: bool | int, gpus: int) -> int | None:
    """The smallest of them of a weight over so many GPUs; None where no dim leaves each of these an equal part."""
    dims = plain_dims(form, align, form.full(weight)).tolist()
    return next((dim for dim in dims if divides(form, weight, dim, scheme, gpus)), None)


def check_forms_divide(sites: Sequence[Site], space: Space, gpus: int) -> None:
    """Refuse a form of which no dim leaves each of several GPUs an equal and aligned part of any weight.

    Raises:
        PlanError: names the form.
    """
    weights = {replace(weight, name="", input_group=None) for site in sites for weight in site.weights}
    for name in space.forms if gpus > 1 else ():
        takers = [(form, weight) for weight in weights for form in variants_of([form_named(name)], weight)]
        if not any(_is_left(form, weight, space, gpus) for form, weight in takers if form.applies_to(weight)):
            aligned = f", aligned to {int(space.align)}" if space.align > 1 else ""
            raise PlanError(
                f"form {name} of weights that are split over {gpus} GPUs{aligned}",
                "a form of which some dim leaves each GPU an equal part, as aligned as the whole",
                "Leave the form out, align to a smaller number, or split over fewer GPUs.",
            )


def _is_left(form: Form, weight: Weight, space: Space, gpus: int) -> bool:
    dims = plain_dims(form, space.align, form.full(weight) - 1)
    schemes = filter(lambda scheme: scheme.applies_to(weight), map(scheme_named, space.schemes))
    return any(_even(form, scheme, weight, dim, gpus, space.align) for scheme in schemes for dim in dims.tolist())


def full_dim(weight: Weight) -> Ints:
    """The only dim of a dense weight."""
    return np.array([DENSE.full(weight)])


def dims_up_to(
    largest: int, site: Site, form: Form, scheme: Scheme, taken: Sequence[int], align: bool | int, timing: Timing
) -> Ints:
    """The dims up to the largest that the scheme allows; of those the aligned and sound ones where asked for.

    Args:
        taken: positions of the weights that take the form together.
        align: as ``Space.align`` has it.
    """
    dims = plain_dims(form, align, largest)
    for weight in (site.weights[at] for at in taken) if timing.gpus > 1 else ():
        evenly = partial(_that_divide, form, scheme, weight, dims, timing.gpus, align)
        dims = dims[timing.once(("divided", form.name, scheme.name, dims.tobytes()), weight, evenly)]
    if align and timing.profile is not None:
        for at in taken:
            weight, fused = site.weights[at], at in site.fused
            sound = partial(timing.sound, form, weight, dims, fused, scheme)
            dims = dims[timing.once(("sound", form.name, scheme.name, fused, dims.tobytes()), weight, sound)]
    for weight in (site.weights[at] for at in taken):
        run = partial(_that_run, form, scheme, weight, dims)
        dims = dims[timing.once(("run", form.name, scheme.name, dims.tobytes()), weight, run)]
    return dims


def that_run(form: Form, scheme: Scheme, weight: Weight, dims: Ints, gpus: int = 1) -> Ints:
    """Those of the dims at which the scheme takes the weight, and has an operator for each of its GEMMs.

    Args:
        gpus: over how many the weight is split; of several each has to have an equal part.
    """
    dims = dims[_that_run(form, scheme, weight, dims)]
    return dims[_that_divide(form, scheme, weight, dims, gpus)] if gpus > 1 else dims


def _that_run(form: Form, scheme: Scheme, weight: Weight, dims: Ints) -> NDArray[np.bool_]:
    """At which dims the scheme takes the weight, and has an operator for each of its GEMMs."""
    if scheme.shape_requirement is None or not scheme.applies_to(weight):
        return np.full(len(dims), scheme.applies_to(weight))
    return np.array(
        [all(map(scheme.supports, form.latency.gemms(weight, dim, 1))) for dim in dims.tolist()], dtype=np.bool_
    )


def _that_divide(
    form: Form, scheme: Scheme, weight: Weight, dims: Ints, gpus: int, align: bool | int = False
) -> NDArray[np.bool_]:
    """At which dims each of several GPUs has an equal part of the weight, as aligned as the dim has to be."""
    return np.array([_even(form, scheme, weight, dim, gpus, align) for dim in dims.tolist()], dtype=np.bool_)


def _even(form: Form, scheme: Scheme, weight: Weight, dim: int, gpus: int, align: bool | int) -> bool:
    if not divides(form, weight, dim, scheme, gpus):
        return False
    if form.dim_counts_units or align <= 1:
        return True
    moved = zip(split_gemms(form, weight, dim, 1, gpus), moved_axes(form, weight), strict=True)
    return all(axis is None or gemm.axes[axis] % align == 0 for gemm, axis in moved)
