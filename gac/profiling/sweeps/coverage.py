"""The shapes to measure: those that one model's allocation needs, from its config alone; or a GPU's in general."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from gac.core.arrays import COARSEST_CLASS
from gac.core.errors import ProfileError
from gac.core.operations import Operation, linear, round_inputs
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS, Form, form_named, variants_of
from gac.forms.planned_sites import check_forms_fit, fuse_sites, targeted_sites, without_misfits
from gac.forms.tensor_parallel import check_splits, divides, moves_parts, split_fused, split_gemms
from gac.models.families import family_of, text_config
from gac.models.shapes import shapes_of
from gac.models.sites import Site, Weight
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.operators.base import AxisSweep, Operator
from gac.profiling.records import Cache, Point
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named

WORKLOADS = (Workload.parse("prefill:1x1024"), Workload.parse("decode:1@1024"))
DTYPES = ("bf16", "fp16")

FP8_SINCE = (8, 9)

DimsOf = Callable[[int], tuple[int, ...]]  # dims to time along an axis that goes up to a size

_CACHES: tuple[Cache, ...] = ("cold", "hot")
_AFFORDED = 700
_COUNTS = 9  # of experts
_PERIOD = 256


def model_points(
    model: Any,
    workloads: Sequence[Workload] = WORKLOADS,
    dtype: str = "bf16",
    forms: Sequence[str] = DEFAULT_FORMS,
    schemes: Sequence[str] = (),
    gpus: int = 1,
) -> tuple[Point, ...]:
    """List the points that a model's allocation looks up: every distinct weight shape at each workload's rows.

    Each weight is measured dense, and in each form that it can take up to the largest dim that saves parameters: at
    ``every_dim`` where that is at most 700 shapes for a number of rows, otherwise at ``spaced_dims``. Then likewise in
    each of the schemes, at those of ``few_dims`` that it runs, and the quantisation of inputs by itself. Few engines
    have a kernel of routed experts in a scheme (``Engine.has_kernels``).

    Args:
        model: a name in ``gac.models.shapes.SHAPES``, or a transformers config; of a multimodal one its text part.
        dtype: ``bf16`` or ``fp16``, of weights as they are loaded.
        gpus: the number of GPUs that weights are split over; every GEMM of a GPU's parts is then measured by itself.

    Raises:
        GacError: the weights cannot be divided over so many GPUs.
        ModelError: the name is unknown, or the config's architecture is not supported.
        PlanError: a form or a scheme is unknown, or a form fits no weight of the model.
        ProfileError: there is no workload, the dtype is neither, or a form or a scheme cannot be timed.
    """
    sites, rows = targeted_sites(text_config(shapes_of(model)), forms), _rows(workloads, dtype)
    forms = without_misfits(sites, tuple(forms))
    check_forms_fit(sites, forms, text_config(shapes_of(model)).model_type)
    check_splits(sites, gpus)
    candidates = [form_named(name) for name in dict.fromkeys(("dense", *forms))]
    for form in candidates:
        if not form.latency.timed and not any(form.cache.axis(weight) for _, weight in _taking([form], sites)):
            raise ProfileError(f"form {form.name}", "a form whose latency is measured", "Leave it out.")
    plain = _operations(sites, candidates, rows, scheme_named(DEFAULT_SCHEME), gpus)
    points = [Point(shape, dtype) for shape in (*plain, *_attentions(sites, candidates, workloads, gpus))]
    for scheme in measured_schemes(schemes):
        points += [Point(x, scheme.dtype) for x in _operations(sites, candidates, rows, scheme, gpus, few_dims)]
        if scheme.input_quantiser and scheme.input_dtype:
            weights = (weight for site in sites for weight in site.weights if weight.input_from_norm)
            sizes = sorted({weight.in_features for weight in weights})
            points += [Point(round_inputs(scheme.input_dtype, m, k), dtype) for m in rows for k in sizes]
    return tuple(dict.fromkeys(points))


def fused_points(
    model: Any,
    workloads: Sequence[Workload] = WORKLOADS,
    dtype: str = "bf16",
    forms: Sequence[str] = DEFAULT_FORMS,
    schemes: Sequence[str] = (),
    gpus: int = 1,
) -> tuple[Point, ...]:
    """List the further points that an allocation looks up where weights of the same input (q/k/v, gate/up) are fused.

    One GEMM, up to the width of all of them, and each second factor by itself, at ``spaced_dims``, and in each of the
    schemes at ``few_dims``. Arguments and errors are those of ``model_points``.
    """
    sites, rows = fuse_sites(_sites(model)), _rows(workloads, dtype)
    distinct = {(site.kind, *((w.out_features, w.in_features) for w in site.weights)): site for site in sites}

    def operations(dims_of: DimsOf) -> list[Operation]:
        fused = (_fused(site, count, forms, dims_of, gpus) for site in distinct.values() for count in rows)
        return list(chain.from_iterable(fused))

    points = [Point(shape, dtype) for shape in operations(spaced_dims)]
    for scheme in measured_schemes(schemes):
        supported = filter(scheme.supports, operations(few_dims))
        points += [Point(scheme.operation(shape), scheme.dtype) for shape in supported]
    return tuple(dict.fromkeys(points))


def general_points(
    dtype: str = "bf16", compute_capability: tuple[int, int] = (9, 0), schemes: Sequence[str] = ()
) -> tuple[Point, ...]:
    """List about 5,000 points that describe a GPU: every operator along the axes that compression changes.

    Args:
        dtype: ``bf16`` or ``fp16``, of everything but the INT4 operators (bf16) and the fp8 ones.
        compute_capability: fp8 is timed from (8, 9) on.
        schemes: time GEMMs in these too, at the shapes that each runs.

    Raises PlanError for an unknown scheme, and ProfileError for another dtype or a scheme that cannot be timed.
    """
    check_dtype(dtype)
    sweeps = [(operator, sweep) for operator in OPERATORS for sweep in operator.general]
    points = [
        Point(shape, sweep.dtype or dtype, cache)
        for operator, sweep in sweeps
        if sweep.dtype != "fp8" or compute_capability >= FP8_SINCE
        for cache in _CACHES[: 1 + sweep.hot]
        for shape in _swept(operator, sweep)
    ]
    points += [
        Point(shape, scheme.dtype)
        for scheme in measured_schemes(schemes)
        for operator, sweep in sweeps
        if sweep.dtype is None and operator.takes(scheme.dtype)
        for shape in _swept(operator, sweep)
        if operator.refusal(shape.axes, scheme.dtype) is None
    ]
    return tuple(dict.fromkeys(points))


def _swept(operator: Operator, sweep: AxisSweep) -> Iterator[Operation]:
    yield from (operation(operator.name, **sweep.fixed, **{sweep.axis: dim}) for dim in sorted(sweep.dims))


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ProfileError(f"dtype {dtype!r}", f"one of {', '.join(DTYPES)}", "Correct the name.")


def measured_schemes(names: Sequence[str]) -> tuple[Scheme, ...]:
    """Return these schemes; ProfileError where one has neither a storage nor a dtype that GEMMs are timed in."""
    schemes = tuple(map(scheme_named, names))
    for scheme in schemes:
        if not OPERATORS.get("linear").takes(scheme.dtype):
            raise ProfileError(
                f"scheme {scheme.name}, whose dtype in tables is {scheme.dtype!r}",
                f"a scheme with a storage, or a dtype of {', '.join(DTYPES)}",
                "Leave it out, or give it a storage.",
            )
    return schemes


def _sites(model: Any) -> tuple[Site, ...]:
    config = text_config(shapes_of(model))
    return family_of(config).sites(config)


def _rows(workloads: Sequence[Workload], dtype: str) -> list[int]:
    check_dtype(dtype)
    if not workloads:
        raise ProfileError("no workload", "at least one", f"Use {WORKLOADS[0]} and {WORKLOADS[1]}, the default.")
    return sorted({workload.rows for workload in workloads})


def _operations(
    sites: Iterable[Site],
    forms: Sequence[Form],
    rows: Sequence[int],
    scheme: Scheme,
    gpus: int,
    dims_of: DimsOf | None = None,
) -> Iterator[Operation]:
    """Yield the operations of these weights in a scheme, at the dims at which it has an operator for every GEMM.

    ``dims_of`` None: as many dims as can be afforded.
    """
    weights = [weight for site in sites for weight in site.weights if scheme.applies_to(weight)]
    distinct = dict.fromkeys(replace(weight, name="", input_group=None, block=None) for weight in weights)
    shapes = _shapes(distinct, forms, dims_of or every_dim, gpus)
    if dims_of is None and len(shapes) > _AFFORDED:
        shapes = _shapes(distinct, forms, spaced_dims, gpus)
    for form, weight, dim in shapes:
        if gpus > 1 and divides(form, weight, dim, scheme, gpus):
            yield from (scheme.operation(gemm) for m in rows for gemm in split_gemms(form, weight, dim, m, gpus))
        elif gpus == 1 and (weight.experts or all(map(scheme.supports, form.latency.gemms(weight, dim, 1)))):
            timed = (
                (form.latency.operation(weight, dim, m),) if form.latency.timed else form.latency.gemms(weight, dim, m)
                for m in rows
            )
            yield from map(scheme.operation, chain.from_iterable(timed))


def _taking(forms: Iterable[Form], sites: Iterable[Site]) -> Iterator[tuple[Form, Weight]]:
    weights = [weight for site in sites for weight in site.weights]
    return ((form, weight) for weight in weights for form in variants_of(forms, weight) if form.applies_to(weight))


def _attentions(
    sites: Iterable[Site], forms: Sequence[Form], workloads: Sequence[Workload], gpus: int
) -> Iterator[Operation]:
    for form, weight in _taking(forms, sites):
        if form.cache.axis(weight) is None or not weight.query_heads or gpus > 1:
            continue
        dims = {*_dims(form, weight, every_dim, gpus), form.cache.assumed_partner_dim(weight)}
        for batch, tokens in ((load.batch, load.tokens) for load in workloads if load.phase == "decode"):
            yield form_named("dense").cache.attention(weight, 1, batch, tokens)
            yield from (form.cache.attention(weight, dim, batch, tokens) for dim in sorted(dims))


def _shapes(
    weights: Iterable[Weight], forms: Iterable[Form], dims_of: DimsOf, gpus: int
) -> list[tuple[Form, Weight, int]]:
    return [
        (form, weight, dim)
        for weight in sorted(weights, key=lambda weight: (weight.out_features, weight.in_features))
        for form in variants_of(forms, weight)
        for dim in _dims(form, weight, dims_of, gpus)
    ]


def _dims(form: Form, weight: Weight, dims_of: DimsOf, gpus: int) -> tuple[int, ...]:
    if not form.applies_to(weight):
        return ()
    if form.latency.axis(weight) is None:
        return (form.full(weight),)
    if weight.experts:  # their latency is linear between counts
        counts = np.linspace(form.least(weight), form.full(weight), _COUNTS)
        return tuple(np.unique(counts.round().astype(int)).tolist())
    if form.dim_counts_units:
        return tuple(range(form.least(weight), form.full(weight)))
    parts, largest = gpus if moves_parts(form, weight, gpus) else 1, form.max_useful_dim(weight)
    dims = {parts * dim for dim in dims_of(largest // parts)}
    if len(form.latency.gemms(weight, 1, 1)) > 1:  # one GEMM writes in parts what another one reads in full
        dims |= {dim for dim in dims_of(largest) if dim % parts == 0}
    return tuple(dim for dim in sorted(dims) if dim % form.step == 0)


def _fused(site: Site, rows: int, forms: Sequence[str], dims_of: DimsOf, gpus: int) -> Iterator[Operation]:
    weights, dense = [site.weights[index] for index in site.fused], form_named("dense")
    if not weights:
        return
    widest = sum(split_fused(dense, weight, dense.full(weight), gpus) for weight in weights)
    yield from (linear(rows, weights[0].in_features, width) for width in sorted({*dims_of(widest), widest}))
    for weight in weights:
        for form in variants_of(map(form_named, forms), weight):
            if not form.applies_to(weight) or form.latency.gemm_after_fused(weight, 1, 1) is None:
                continue
            for dim in _dims(form, weight, dims_of, gpus):
                yield from split_gemms(form, weight, dim, rows, gpus)[1:]


def every_dim(largest: int) -> tuple[int, ...]:
    """Return the multiples of 8 along an axis that goes up to ``largest``, and misaligned probes; sorted."""
    return _within({*range(8, largest + 1, 8), *_probes(largest)}, largest)


def spaced_dims(largest: int) -> tuple[int, ...]:
    """Return sorted dims to time when not all fit; every multiple of 8 can be interpolated.

    - The multiples of 32, from 1024 on those of 64, from 4096 on those of 128: most choices of an allocation are
      measured.
    - Of each alignment class 8, 16 and 32, dims near enough for ``gac.profiling.table.interpolate``.
    - Misaligned probes: 1, 2 and 4 below powers of two, to find the alignment period.
    """
    measured = {*range(32, 1024, 32), *range(1024, 4096, 64), *range(4096, largest + 1, 128), largest // 64 * 64}
    ladders = (dim for step in (8, 16, 32) for dim in _ladder(step, largest))
    return _within({*measured, *ladders, *_probes(largest)}, largest)


def few_dims(largest: int) -> tuple[int, ...]:
    """Return the dims to measure in schemes, sorted; other multiples of 64 can be interpolated.

    - ``spaced_dims`` up to 256, to find the alignment period.
    - From there on multiples of 64, and of 128 from 1024 on, an eighth apart.
    """
    dims, dim = [*spaced_dims(min(largest, _PERIOD))], _PERIOD
    while dim <= largest:
        dims.append(dim)
        step = COARSEST_CLASS if dim < 1024 else 2 * COARSEST_CLASS
        dim += max(dim // 8 // step, 1) * step
    return _within({*dims, largest // COARSEST_CLASS * COARSEST_CLASS}, largest)


def _ladder(step: int, largest: int) -> Iterator[int]:
    """Yield odd multiples of a step, as far apart as interpolation reaches: 64, or a dim's quarter."""
    last = ((largest // step - 1) | 1) * step
    dim = step
    while dim < last:
        yield dim
        widest = max(COARSEST_CLASS, (dim + 2 * step) // 4)
        dim += widest // (2 * step) * (2 * step)
    yield last


def _probes(largest: int) -> Iterator[int]:
    below = (1, 2, 4) if largest >= 256 else (1, 2, 3, 4, 6, 12)
    anchor = 64
    while anchor <= largest:
        yield from (anchor - offset for offset in below)
        anchor *= 2


def _within(dims: Iterable[int], largest: int) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if 8 <= dim <= largest))
