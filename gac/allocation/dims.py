"""The dims that a form may take of a weight: aligned, sound, evenly divided and run by the scheme's operators."""

from collections.abc import Sequence
from functools import partial
from math import lcm

import numpy as np
from numpy.typing import NDArray

from gac.allocation.latencies import Timing, unnamed
from gac.core.arrays import Ints
from gac.core.errors import PlanError
from gac.forms import Form, form_named, variants_of
from gac.forms.tensor_parallel import divides, moved_axes, split_gemms
from gac.models.sites import Site, Weight
from gac.plan.engines import TRANSFORMERS, Engine
from gac.plan.recipe import Space
from gac.schemes import Scheme, scheme_named, scheme_of


def step_of(form: Form, align: bool | int) -> int:
    return lcm(form.step, int(align)) if align and not form.dim_counts_units else 1


def plain_dims(form: Form, align: bool | int, largest: int) -> Ints:
    step = step_of(form, align)
    return np.arange(step if form.min_dim else 0, largest + 1, step, dtype=np.int64)


def first_dim(form: Form, weight: Weight, scheme: Scheme, align: bool | int, gpus: int) -> int | None:
    """Return the smallest of them that leaves each GPU an equal part of a weight; None if none does."""
    dims = plain_dims(form, align, form.full(weight)).tolist()
    return next((dim for dim in dims if divides(form, weight, dim, scheme, gpus)), None)


def check_forms_divide(sites: Sequence[Site], space: Space, gpus: int) -> None:
    """Refuse a form of which no dim leaves each of several GPUs an equal and aligned part of any weight."""
    weights = {unnamed(weight) for site in sites for weight in site.weights}
    for name in space.forms:
        takers = [(form, weight) for weight in weights for form in variants_of([form_named(name)], weight)]
        if not any(_some_dim_divides(form, weight, space, gpus) for form, weight in takers if form.applies_to(weight)):
            aligned = f", aligned to {int(space.align)}" if space.align > 1 else ""
            raise PlanError(
                f"form {name} of weights that are split over {gpus} GPUs{aligned}",
                "a form of which some dim leaves each GPU an equal and equally aligned part",
                "Leave the form out, align to a smaller number, or split over fewer GPUs.",
            )


def _some_dim_divides(form: Form, weight: Weight, space: Space, gpus: int) -> bool:
    dims = plain_dims(form, space.align, form.full(weight) - 1)
    schemes = filter(lambda scheme: scheme.applies_to(weight), map(scheme_named, space.schemes))
    return any(_even(form, scheme, weight, dim, gpus, space.align) for scheme in schemes for dim in dims.tolist())


def full_dim(weight: Weight) -> Ints:
    return np.array([form_named("dense").full(weight)])


def allowed_dims(
    largest: int, site: Site, form: Form, scheme: Scheme, taken: Sequence[int], align: bool | int, timing: Timing
) -> Ints:
    """Return the dims, for all ``taken`` weights, that the scheme allows, aligned and sound if asked for."""
    dims = plain_dims(form, align, largest)
    dims = dims[dims >= max(form.least(site.weights[position]) for position in taken)]
    dims = dims[np.all([dims % form.multiple(site.weights[position]) == 0 for position in taken], axis=0)]
    for weight in (site.weights[position] for position in taken) if timing.gpus > 1 else ():
        evenly = partial(_divided, form, scheme, weight, dims, timing.gpus, align)
        dims = dims[timing.once(("divided", form.name, scheme.name, dims.tobytes()), weight, evenly)]
    if align and timing.profile is not None:
        for position in taken:
            weight, fused = site.weights[position], position in site.fused
            sound = partial(timing.sound, form, weight, dims, fused, scheme)
            dims = dims[timing.once(("sound", form.name, scheme.name, fused, dims.tobytes()), weight, sound)]
    for weight in (site.weights[position] for position in taken):
        run = partial(_runnable, form, scheme_of(scheme, weight), weight, dims, timing.engine)
        dims = dims[timing.once(("run", form.name, scheme.name, dims.tobytes()), weight, run)]
    return dims


def runnable_dims(
    form: Form, scheme: Scheme, weight: Weight, dims: Ints, gpus: int = 1, engine: Engine = TRANSFORMERS
) -> Ints:
    """Return the dims at which the scheme takes the weight, has an operator for each GEMM, and GPUs equal parts.

    The engine's plugin multiplies with kernels alone, so that they have to read each matrix.
    """
    dims = dims[_runnable(form, scheme, weight, dims, engine)]
    return dims[_divided(form, scheme, weight, dims, gpus)] if gpus > 1 else dims


def _runnable(form: Form, scheme: Scheme, weight: Weight, dims: Ints, engine: Engine) -> NDArray[np.bool_]:
    if weight.experts and not engine.runs_experts(scheme):
        return np.zeros(len(dims), dtype=np.bool_)
    if not scheme.applies_to(weight) or takes_any_dim(scheme, engine) or weight.experts:
        return np.full(len(dims), scheme.applies_to(weight) and _divides_experts(form, scheme, weight))
    return np.array([_has_operators(form, scheme, weight, dim, engine) for dim in dims.tolist()], dtype=np.bool_)


def _divides_experts(form: Form, scheme: Scheme, weight: Weight) -> bool:
    """Return whether experts share no scale and no word in a storage, one above the other; true of other weights."""
    if not (scheme.lossy and weight.experts):
        return True
    experts, _ = form.routed_sizes(weight, 1)
    return not any(rows // experts % scheme.step for rows, _ in form.latency.matrices(weight, 1))


def takes_any_dim(scheme: Scheme, engine: Engine) -> bool:
    return scheme.shape_requirement is None and not (engine.plugin and scheme.storage is not None)


def _has_operators(form: Form, scheme: Scheme, weight: Weight, dim: int, engine: Engine) -> bool:
    if not all(map(scheme.supports, form.latency.gemms(weight, dim, 1))):
        return False
    return unread_reason(form, scheme, weight, dim, engine) is None


def unread_reason(form: Form, scheme: Scheme, weight: Weight, dim: int, engine: Engine) -> str | None:
    """Return why the kernels of an engine's plugin cannot read a weight so; None where they can, or it has none."""
    matrices = form.latency.matrices(weight, dim) if engine.plugin else ()
    return next(filter(None, (scheme.kernel_unsupported_reason(*matrix) for matrix in matrices)), None)


def _divided(
    form: Form, scheme: Scheme, weight: Weight, dims: Ints, gpus: int, align: bool | int = False
) -> NDArray[np.bool_]:
    return np.array([_even(form, scheme, weight, dim, gpus, align) for dim in dims.tolist()], dtype=np.bool_)


def _even(form: Form, scheme: Scheme, weight: Weight, dim: int, gpus: int, align: bool | int) -> bool:
    if not divides(form, weight, dim, scheme, gpus):
        return False
    if form.dim_counts_units or align <= 1:
        return True
    moved = zip(split_gemms(form, weight, dim, 1, gpus), moved_axes(form, weight), strict=True)
    return all(axis is None or gemm.axes[axis] % align == 0 for gemm, axis in moved)
