"""The contract of a form."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from gac.compression.apply import build_modules, empty_module, merged, skipped_blocks
from gac.core.arrays import Floats
from gac.core.operations import Operation
from gac.forms import FORMS, Form
from gac.forms.curvature.registry import METHODS
from gac.forms.planned_sites import as_planned
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import LayerFit, fit_layers
from gac.models.families import family_of
from gac.models.modules import swap_in
from gac.models.sites import Site, Weight
from gac.plan.plan import WeightChoice
from gac.profiling.operators import OPERATORS
from gac.runtime.finish import Description, finish
from gac.runtime.modules import KINDS
from gac.testing.models import tiny_model

_TOKENS = 40
_ROWS = 8


def check_form(form: Form, *weights: Weight, method: str = "kfac") -> None:
    """Refuse a form whose sizes, costs, operations, modules or curves contradict each other.

    Of the weights given and those of a tiny random Llama that it takes: a larger dim has more parameters, as many as
    its module and as its GEMMs read; its operation is one of a latency table and moved by the dim along the axis that
    it names; its dim lies where it says in the module's tensors. Of that Llama: curves fall to 0 at the full dim, at
    which the model computes what it did; at half of it the model computes what it does when merged to dense weights,
    and its cache keeps as many numbers as the form counts. What rounding for the cache changes is allowed, and priced.

    A form that stands for several (``Form.variants``) is checked as each of them. One that lies inside another is as
    long as the other where weights meet; its full dim computes what the other does, and is the weight that its dims are
    smaller than. ``method`` is what errors are measured in.

    Raises:
        AssertionError: says what does not hold, of which weight at which dim.
        GacError: the registry refuses the form.
    """
    FORMS.register(form)
    assert len(form.symbol) == 1, f"{form.name}.symbol is {form.symbol!r}, not one letter"
    assert form.meaning, f"{form.name}.meaning is empty"
    model = tiny_model()
    sites = as_planned(family_of(model.config).sites(model.config), [form.name], False)
    applicable = [site for site in sites if all(map(form.applies_to, site.weights))]
    assert applicable, f"{form.name} takes no weight of a tiny Llama"
    first_layer = (weight for site in applicable if site.layer == applicable[0].layer for weight in site.weights)
    for weight in (*weights, *first_layer):
        assert form.applies_to(weight), f"{form.name} does not take {weight.name}"
        assert form.variants(weight), f"{form.name} takes {weight.name}, and stands for no form of it"
        for variant in form.variants(weight):
            _check_weight(variant, weight)
    run = CalibrationRun(model, _ids(form), METHODS.get(method), progress=False)
    fits = fit_layers(run, sites, forms=[form.name])
    for variant in {
        variant.name: variant for site in applicable for variant in form.variants(site.weights[0])
    }.values():
        for layer in {site.layer for site in applicable}:
            _check_curves(variant, layer, fits[layer].losses)
        _check_model(variant, run, applicable, fits)


def _check_weight(form: Form, weight: Weight) -> None:
    full = form.full(weight)
    for dim in sorted({form.min_dim, 1, max(1, full // 2), max(1, full - 1), full}):
        of = f"{form.name} of {weight.name} at dim {dim}"
        _check_sizes(form, weight, dim, of)
        _check_operations(form, weight, dim, of)
        if 0 < dim < full:
            _check_places(form, weight, dim, of)
        _check_meets(form, weight, dim, of)
    counts = [form.params(weight, dim) for dim in range(1, full + 1)]
    growing = {*counts} == {weight.params} or all(less < more for less, more in pairwise(counts))
    assert growing, f"{form.name} of {weight.name}: a larger dim does not always have more parameters"
    outer, length = form.shortening(1)
    dense = outer.params(weight, length) if form.parent_form_name else weight.params
    smaller, useful = sum(count < dense for count in counts), form.max_useful_dim(weight)
    right = form.cache.axis(weight) is not None or min(useful, len(counts)) == smaller
    assert right, f"{form.name} of {weight.name}: dims up to {smaller} are smaller than dense, not {useful}"


def _check_meets(form: Form, weight: Weight, dim: int, of: str) -> None:
    outer, length = form.shortening(dim)
    inside = form.parent_form_name or form.name
    assert outer.name == inside, f"{of}: as long as {outer.name}, inside {form.parent_form_name}"
    side = outer.shortens(weight)
    assert side or not form.parent_form_name, f"{of}: inside {outer.name}, which does not shorten the weight"
    if side:
        name, both = f"{side}_features", [form.module(weight, dim).sizes, outer.module(weight, length).sizes]
        ours, theirs = (sizes.get(name, sizes.get("heads", 0) * sizes.get("length", 0)) for sizes in both)
        assert ours == theirs, f"{of}: {name} is {ours} where {outer.name} {length} has {theirs}"


def _check_sizes(form: Form, weight: Weight, dim: int, of: str) -> None:
    spec = form.module(weight, dim)
    assert spec.module in KINDS, f"{of}: module {spec.module} is none of {', '.join(KINDS)}; add it to KINDS"
    names, largest = set(KINDS[spec.module][1]), max(weight.out_features, weight.in_features)
    assert set(spec.sizes) == names, f"{of}: sizes are {', '.join(spec.sizes)}, not {', '.join(sorted(names))}"
    wrong = {name: size for name, size in spec.sizes.items() if type(size) is not int or not 1 <= size <= largest}
    assert not wrong, f"{of}: sizes {wrong} are no integers from 1 to {largest}"
    parameters = _parameters(form, weight, dim, bias=False)
    stored = sum(prod(shape) for name, shape in parameters.items() if not name.endswith("bias"))
    assert stored == form.params(weight, dim), f"{of}: {form.params(weight, dim)} parameters, its module holds {stored}"
    cached = form.cache.numbers(weight, dim)
    valid = type(cached) is int and 0 <= cached <= weight.cached_numbers
    assert valid, f"{of}: keeps {cached!r} numbers of a token in the KV cache, {weight.cached_numbers} if dense"


def _check_operations(form: Form, weight: Weight, dim: int, of: str) -> None:
    operation, axis = form.latency.operation(weight, dim, _ROWS), form.latency.axis(weight)
    gemms = form.latency.gemms(weight, dim, _ROWS)
    for gemm in (operation, *gemms):
        assert isinstance(gemm, Operation), f"{of}: runs {gemm!r}, which is no Operation"
    known = operation.operator in OPERATORS.names or not form.latency.timed
    assert known, f"{of}: runs {operation.operator}, which is no operator of latency tables, and is not marked so"
    numbers = sum(gemm.axes.get("b", 1) * gemm.axes["k"] * gemm.axes["n"] for gemm in gemms)
    assert numbers == form.params(weight, dim), f"{of}: its GEMMs read {numbers} numbers, not as many as parameters"
    if axis is not None:
        axes, size = operation.axes, form.size(weight, dim)
        assert axis in axes, f"{of}: axis {axis} is none of its operation, {operation}"
        assert axes[axis] == size, f"{of}: axis {axis} of its operation is {axes[axis]}, its size is {size}"


def _check_places(form: Form, weight: Weight, dim: int, of: str) -> None:
    grown, more = (_parameters(form, weight, size, bias=True) for size in (dim, dim + 1))
    for place in form.places(weight, dim):
        assert place.tensor in grown, f"{of}: its dim lies in {place.tensor}, which its module has not"
        inside = all(end <= grown[place.tensor][place.axis] for end in place.ends)
        assert inside, f"{of}: places {place.ends} lie outside of {place.tensor} {tuple(grown[place.tensor])}"
        grown[place.tensor][place.axis] += len(place.ends) * place.unit
    assert grown == more, f"{of}: one dim more at its places makes {grown}, its module of that dim has {more}"


def _parameters(form: Form, weight: Weight, dim: int, bias: bool) -> dict[str, list[int]]:
    module = empty_module(WeightChoice(weight, form.name, dim), bias, "meta", torch.float32)
    return {name: list(parameter.shape) for name, parameter in module.named_parameters()}


def _check_curves(form: Form, layer: int, losses: Mapping[str, Floats]) -> None:
    curves = {name: loss for name, loss in losses.items() if name.startswith(f"{form.name}/")}
    assert curves, f"{form.name}: no loss curve of layer {layer} is measured"
    for name, loss in curves.items():
        exact = loss
        if form.cache.bits is not None and form.base_form is None:
            exact = loss - loss[-1]
        elif form.cache.bits is not None:
            assert form.base_form is not None
            exact = losses[f"{form.base_form.name}/{name.partition('/')[2]}"]
            assert bool((loss >= exact).all()), f"{name}: rounding wins at some dim"
        assert exact[-1] == 0, f"{name}: the full dim loses {exact[-1]} nats a token"
        assert bool((exact[:-1] >= exact[1:]).all()), f"{name}: a larger dim loses more than a smaller one"


def _check_model(form: Form, run: CalibrationRun, sites: Sequence[Site], fits: Mapping[int, LayerFit]) -> None:
    model, (outer, length) = run.model, form.shortening(1)
    lengths = {site.name: length for site in sites}
    before = _logits(form, _compressed(outer, run, sites, fits, lengths) if form.parent_form_name else model)
    full = {site.name: form.full(site.weights[0]) for site in sites}
    full_model = _compressed(form, run, sites, fits, full)
    difference, tolerance = float((_logits(form, full_model) - before).abs().max()), _near(form, full, before)
    than = f"{outer.name} {length}'s" if form.parent_form_name else "the dense model's"
    assert difference < tolerance, f"{form.name} at the full dim: logits differ by up to {difference:.2g} from {than}"
    half = {name: max(form.min_dim, dim // 2) for name, dim in full.items()}
    smaller = _compressed(form, run, sites, fits, half)
    _check_cache(form, smaller, half)
    dense = deepcopy(model)
    for site in sites:
        for weight in site.weights:
            choice = WeightChoice(weight, form.name, half[site.name])
            tensors = merged(choice, smaller.get_submodule(weight.name).state_dict())
            linear = nn.Linear(weight.in_features, weight.out_features, bias="bias" in tensors)
            linear.load_state_dict(tensors)
            dense.set_submodule(weight.name, linear)
    difference, tolerance = (
        float((_logits(form, smaller) - _logits(form, dense)).abs().max()),
        _near(form, half, before),
    )
    assert difference < tolerance, (
        f"{form.name} at half the dim: logits differ by up to {difference:.2g} from those of merged weights"
    )


def _near(form: Form, dims: Mapping[str, int], logits: Tensor) -> float:
    bits = form.cache.bits_at(min(dims.values()))
    return 1e-3 if bits is None else float(logits.abs().max()) * 2.0 ** (2 - bits)


def _check_cache(form: Form, model: nn.Module, dims: Mapping[str, int]) -> None:
    ids, logits = _ids(form), _logits(form, model)
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        last = model(ids[:, -1:], past_key_values=cache, use_cache=True).logits
    difference = float((last - logits[:, -1:]).abs().max())
    assert difference < _near(form, dims, logits), (
        f"{form.name} at half the dim: with a cache logits differ by up to {difference:.2g}"
    )
    if form.cache.exact_tokens:  # most of the cache is exact, which is not counted
        return
    layers = [layer for layer in cache.layers if layer.is_initialized]
    cached = sum(tensor[0, :, 0].numel() for layer in layers for tensor in (layer.keys, layer.values))
    sites = as_planned(family_of(model.config).sites(model.config), [form.name], False)
    counted = sum(
        form.cache.numbers(weight, dims[site.name]) if site.name in dims else weight.cached_numbers
        for site in sites
        for weight in site.weights
    )
    assert cached == counted, f"{form.name} at half the dim: the cache keeps {cached} numbers of a token, not {counted}"


def _compressed(
    form: Form, run: CalibrationRun, sites: Sequence[Site], fits: Mapping[int, LayerFit], dims: Mapping[str, int]
) -> nn.Module:
    choices = [WeightChoice(weight, form.name, dims[site.name]) for site in sites for weight in site.weights]
    copy = deepcopy(run.model)
    swap_in(copy, build_modules(run, choices, sites, fits))
    finish(copy, Description(skipped=skipped_blocks(copy.config, choices)), kernels=False)
    return copy


def _ids(form: Form) -> Tensor:
    return torch.arange(2 * (_TOKENS + form.cache.exact_tokens)).remainder(250).view(2, -1)


def _logits(form: Form, model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(_ids(form)).logits
    return logits
