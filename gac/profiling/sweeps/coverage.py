"""Which shapes one model's allocation needs, from its config alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gac.core.errors import ProfileError
from gac.core.operations import Operation, linear, round_inputs
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS, DENSE, Form, form_named, variants_of
from gac.forms.planned_sites import check_forms_fit, fuse_sites
from gac.forms.tensor_parallel import check_splits, divides, moves_parts, split_fused, split_gemms
from gac.models.attentions import heads_of, window_of
from gac.models.families import family_of, text_config
from gac.models.shapes import shapes_of
from gac.models.sites import Site, Weight
from gac.plan.costs import floored
from gac.profiling.alignment import COARSEST_CLASS
from gac.profiling.operators import OPERATORS, with_decode_kernel
from gac.profiling.records import Point
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named

WORKLOADS = (Workload.parse("prefill:1x1024"), Workload.parse("decode:1@1024"))
DTYPES = ("bf16", "fp16")

_AFFORDED = 700
_PERIOD = 256


def model_points(
    model: Any,
    workloads: Sequence[Workload] = WORKLOADS,
    dtype: str = "bf16",
    forms: Sequence[str] = DEFAULT_FORMS,
    schemes: Sequence[str] = (),
    gpus: int = 1,
) -> tuple[Point, ...]:
    """What a model's allocation looks up: every distinct weight shape at each workload's number of rows.

    Each weight is measured dense, and in each form that it can take up to the largest dim that saves parameters: at
    ``every_dim`` where that is at most 700 shapes for a number of rows, otherwise at ``spaced_dims``. Then likewise in
    each of the schemes, at those of ``few_dims`` that it runs, with the rounding of inputs by itself.

    Args:
        model: a name in ``gac.models.shapes.SHAPES``, or a transformers config; of a multimodal one its text part.
        dtype: ``bf16`` or ``fp16``, of weights as they are loaded.
        forms: which forms besides dense.
        schemes: in which schemes weights are measured besides.
        gpus: over how many weights are split; of several, every GEMM of a GPU's parts is measured by itself.

    Raises:
        GacError: the weights cannot be divided over so many GPUs.
        ModelError: the name is unknown, or the config's architecture is not supported.
        PlanError: a form or a scheme is unknown, or a form fits no weight of the model.
        ProfileError: there is no workload, the dtype is none of the two, or what a form or a scheme runs is not
            measured.
    """
    sites, rows = _sites(model), _rows(workloads, dtype)
    check_forms_fit(sites, forms, text_config(shapes_of(model)).model_type)
    check_splits(sites, gpus)
    taken = [form_named(name) for name in dict.fromkeys((DENSE.name, *forms))]
    for form in taken:
        if not form.latency.timed and not any(form.cache.axis(weight) for _, weight in _taking([form], sites)):
            raise ProfileError(f"form {form.name}", "a form whose latency is measured", "Leave it out.")
    points = _points(_operations(sites, taken, rows, scheme_named(DEFAULT_SCHEME), gpus), dtype)
    points += _points(_attentions(sites, taken, workloads, gpus), dtype)
    for scheme in measured_schemes(schemes):
        points += _points(_operations(sites, taken, rows, scheme, gpus, few_dims), scheme.dtype)
        if numbers := scheme.input_dtype:
            points += _points(_roundings(sites, rows, numbers), dtype)
    return tuple(dict.fromkeys(points))


def fused_points(
    model: Any,
    workloads: Sequence[Workload] = WORKLOADS,
    dtype: str = "bf16",
    forms: Sequence[str] = DEFAULT_FORMS,
    schemes: Sequence[str] = (),
    gpus: int = 1,
) -> tuple[Point, ...]:
    """What an allocation looks up in addition where weights that read the same input (q/k/v, gate/up) are fused.

    One GEMM, up to the width of all of them, and each second factor by itself, at ``spaced_dims``, and in each of the
    schemes at ``few_dims``. Arguments and errors are those of ``model_points``.
    """
    sites, rows = fuse_sites(_sites(model)), _rows(workloads, dtype)
    distinct = {(site.kind, *((w.out_features, w.in_features) for w in site.weights)): site for site in sites}

    def operations(dims_of: Callable[[int], tuple[int, ...]]) -> list[Operation]:
        return [
            one for site in distinct.values() for count in rows for one in _fused(site, count, forms, dims_of, gpus)
        ]

    points = _points(operations(spaced_dims), dtype)
    for scheme in measured_schemes(schemes):
        points += _points(map(scheme.operation, filter(scheme.supports, operations(few_dims))), scheme.dtype)
    return tuple(dict.fromkeys(points))


def token_points(
    model: Any, workloads: Sequence[Workload], shares: Iterable[float], step: int, dtype: str = "bf16"
) -> tuple[Point, ...]:
    """What a plan of tokens kept looks up: attention over a share of the cache of each workload that decodes.

    Args:
        model: as for ``model_points``.
        shares: of the context; all of it, and what layers of a sliding window see, are measured besides.
        step: numbers of tokens are rounded down to a multiple of it.

    Raises:
        ModelError: as for ``model_points``.
        ProfileError: no workload decodes, or the dtype is neither ``bf16`` nor ``fp16``.
    """
    check_dtype(dtype)
    config = text_config(shapes_of(model))
    family_of(config)
    decoding = [one for one in workloads if one.phase == "decode"]
    if not decoding:
        raise ProfileError("attention over tokens kept without a workload that decodes", "decode:B@C", "Name one.")
    heads, window = heads_of(config), window_of(config)
    found = []
    for one in decoding:
        kept = (floored(share, one.tokens) // step * step for share in shares)
        lengths = {*kept, one.tokens, min(one.tokens, window or one.tokens)} - {0}
        found += [heads.over(one.batch, tokens) for tokens in sorted(lengths)]
    return _points(found, dtype)


def decode_kernel_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that it looks up instead of these where GEMMs of one row run in Triton."""
    found = dict.fromkeys(replace(one, operation=with_decode_kernel(one.operation, one.dtype)) for one in points)
    known = set(points)
    return tuple(one for one in found if one not in known)


def check_dtype(dtype: str) -> None:
    """Refuse what no sweep measures.

    Raises:
        ProfileError: the dtype is neither ``bf16`` nor ``fp16``.
    """
    if dtype not in DTYPES:
        raise ProfileError(f"dtype {dtype!r}", f"one of {', '.join(DTYPES)}", "Correct the name.")


def measured_schemes(names: Sequence[str]) -> tuple[Scheme, ...]:
    """These schemes.

    Raises:
        PlanError: one is unknown.
        ProfileError: one has neither a storage nor numbers that GEMMs are timed in.
    """
    found = tuple(map(scheme_named, names))
    for scheme in found:
        if not OPERATORS.get("linear").takes(scheme.dtype):
            raise ProfileError(
                f"scheme {scheme.name}, whose dtype in tables is {scheme.dtype!r}",
                f"a scheme with a storage, or a dtype of {', '.join(DTYPES)}",
                "Leave it out, or give it a storage.",
            )
    return found


def _sites(model: Any) -> tuple[Site, ...]:
    config = text_config(shapes_of(model))
    return family_of(config).sites(config)


def _rows(workloads: Sequence[Workload], dtype: str) -> list[int]:
    check_dtype(dtype)
    if not workloads:
        raise ProfileError("no workload", "at least one", f"Use {WORKLOADS[0]} and {WORKLOADS[1]}, the default.")
    return sorted({workload.rows for workload in workloads})


def _points(operations: Iterable[Operation], dtype: str) -> tuple[Point, ...]:
    return tuple(dict.fromkeys(Point(one, dtype) for one in operations))


def _operations(
    sites: Iterable[Site],
    forms: Sequence[Form],
    rows: Sequence[int],
    scheme: Scheme,
    gpus: int,
    dims_of: Callable[[int], tuple[int, ...]] | None = None,
) -> Iterator[Operation]:
    """What runs of these weights in a scheme, at the dims at which it has an operator for every GEMM.

    Args:
        dims_of: those to measure up to the largest; None: as many as can be afforded.
    """
    weights = [weight for site in sites for weight in site.weights if scheme.applies_to(weight)]
    distinct = {replace(weight, name="", input_group=None, block=None) for weight in weights}
    shapes = _shapes(distinct, forms, dims_of or every_dim, gpus)
    if dims_of is None and len(shapes) > _AFFORDED:
        shapes = _shapes(distinct, forms, spaced_dims, gpus)
    for form, weight, dim in shapes:
        if gpus > 1 and divides(form, weight, dim, scheme, gpus):
            yield from (scheme.operation(one) for m in rows for one in split_gemms(form, weight, dim, m, gpus))
        elif gpus == 1 and all(map(scheme.supports, form.latency.gemms(weight, dim, 1))):
            yield from (scheme.operation(one) for count in rows for one in _run(form, weight, dim, count))


def _run(form: Form, weight: Weight, dim: int, rows: int) -> tuple[Operation, ...]:
    """What tables hold of it: its operation, or its GEMMs where that is none of theirs."""
    return (form.latency.operation(weight, dim, rows),) if form.latency.timed else form.latency.gemms(weight, dim, rows)


def _taking(forms: Iterable[Form], sites: Iterable[Site]) -> Iterator[tuple[Form, Weight]]:
    """The forms that weights can have, each with every weight that can have it."""
    weights = [weight for site in sites for weight in site.weights]
    return ((form, weight) for weight in weights for form in variants_of(forms, weight) if form.applies_to(weight))


def _attentions(
    sites: Iterable[Site], forms: Sequence[Form], workloads: Sequence[Workload], gpus: int
) -> Iterator[Operation]:
    """What attends over caches that forms make smaller, at their dims, and over the dense one."""
    for form, weight in _taking(forms, sites):
        if form.cache.axis(weight) is None or not weight.query_heads or gpus > 1:
            continue
        dims = {*_dims(form, weight, every_dim, gpus), form.cache.assumed_partner_dim(weight)}
        for one in (one for one in workloads if one.phase == "decode"):
            yield DENSE.cache.attention(weight, 1, one.batch, one.tokens)
            yield from (form.cache.attention(weight, dim, one.batch, one.tokens) for dim in sorted(dims))


def _roundings(sites: Iterable[Site], rows: Sequence[int], numbers: str) -> Iterator[Operation]:
    """The rounding of inputs that the norm before can do instead, so that it counts no more."""
    sizes = {weight.in_features for site in sites for weight in site.weights if weight.input_from_norm}
    yield from (round_inputs(numbers, count, size) for count in rows for size in sorted(sizes))


def _shapes(
    weights: Iterable[Weight], forms: Iterable[Form], dims_of: Callable[[int], tuple[int, ...]], gpus: int
) -> list[tuple[Form, Weight, int]]:
    """These forms of every weight, each at its full dim or at the dims to measure."""
    return [
        (form, weight, dim)
        for weight in sorted(weights, key=lambda one: (one.out_features, one.in_features))
        for form in variants_of(forms, weight)
        for dim in _dims(form, weight, dims_of, gpus)
    ]


def _dims(form: Form, weight: Weight, dims_of: Callable[[int], tuple[int, ...]], gpus: int) -> tuple[int, ...]:
    if form.latency.axis(weight) is None:
        return (form.full(weight),)
    if not form.applies_to(weight):
        return ()
    if form.dim_counts_units:
        return tuple(range(1, form.full(weight)))
    parts, largest = gpus if moves_parts(form, weight, gpus) else 1, form.max_useful_dim(weight)
    dims = {parts * dim for dim in dims_of(largest // parts)}
    if len(form.latency.gemms(weight, 1, 1)) > 1:  # what one GEMM writes in parts another one reads whole
        dims |= {dim for dim in dims_of(largest) if dim % parts == 0}
    return tuple(dim for dim in sorted(dims) if dim % form.step == 0)


def _fused(
    site: Site, rows: int, forms: Sequence[str], dims_of: Callable[[int], tuple[int, ...]], gpus: int
) -> Iterator[Operation]:
    weights, dense = [site.weights[at] for at in site.fused], DENSE
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
    """The multiples of 8 along an axis that goes up to ``largest``, and misaligned probes; sorted."""
    return _within({*range(8, largest + 1, 8), *_probes(largest)}, largest)


def spaced_dims(largest: int) -> tuple[int, ...]:
    """The dims to measure where not all can be, sorted; between them no multiple of 8 goes without a latency.

    - The multiples of 32, from 1024 on those of 64, from 4096 on those of 128: most of what an allocation chooses was
      measured.
    - Of each alignment class 8, 16 and 32, dims near enough for ``gac.profiling.table.interpolate``.
    - Misaligned probes: 1, 2 and 4 below powers of two, to tell the alignment period.
    """
    ladders = (dim for step in (8, 16, 32) for dim in _ladder(step, largest))
    return _within({*_measured(largest), *ladders, *_probes(largest)}, largest)


def few_dims(largest: int) -> tuple[int, ...]:
    """The dims to measure in schemes, sorted; what lies between those of a multiple of 64 can be interpolated.

    - ``spaced_dims`` up to 256: they tell the alignment period.
    - From there on multiples of 64, and of 128 from 1024 on, an eighth apart.
    """
    found, dim = [*spaced_dims(min(largest, _PERIOD))], _PERIOD
    while dim <= largest:
        found.append(dim)
        step = COARSEST_CLASS if dim < 1024 else 2 * COARSEST_CLASS
        dim += max(dim // 8 // step, 1) * step
    return _within({*found, largest // COARSEST_CLASS * COARSEST_CLASS}, largest)


def _measured(largest: int) -> Iterator[int]:
    yield from range(32, min(largest, 1024) + 1, 32)
    yield from range(1024, min(largest, 4096) + 1, 64)
    yield from range(4096, largest + 1, 128)
    yield largest // 64 * 64


def _ladder(step: int, largest: int) -> Iterator[int]:
    """Odd multiples of a step up to the last one, as far apart as interpolation reaches: 64, or a dim's quarter."""
    last = ((largest // step - 1) | 1) * step
    dim = step
    while dim < last:
        yield dim
        widest = max(COARSEST_CLASS, (dim + 2 * step) // 4)
        dim += widest // (2 * step) * (2 * step)
    yield last


def _probes(largest: int) -> Iterator[int]:
    """Odd dims, odd multiples of 2 and of 4: at least three of each where the axis reaches 128."""
    below = (1, 2, 4) if largest >= 256 else (1, 2, 3, 4, 6, 12)
    anchor = 64
    while anchor <= largest:
        yield from (anchor - offset for offset in below)
        anchor *= 2


def _within(dims: Iterable[int], largest: int) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if 8 <= dim <= largest))
