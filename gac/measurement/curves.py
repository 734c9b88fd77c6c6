"""From statistics to loss curves: every layer in turn, each weight in every form, kept on disk."""

import logging
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gac.core.arrays import Floats
from gac.core.linalg import at_once, packed
from gac.core.progress import progress_bar, rough_duration
from gac.forms import FORMS, Form, form_named, variants_of
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.metric import FACTOR, Moments
from gac.forms.experts.moments import loss_of_rounded
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.tensors import RunForm, Statistics, tensors_of
from gac.measurement.calibration import (
    ATTENDED,
    CalibrationRun,
    decoder_layers,
    group_by_layer,
    routed_by_layer,
    stream_moments,
)
from gac.measurement.joint_losses import Layers, with_joint_losses
from gac.measurement.moments import LayerMoments
from gac.measurement.routed import check_text_alone
from gac.measurement.runs import ModelRuns, unseen
from gac.measurement.store import TensorFile, background_writer, read_arrays, write_tensors
from gac.models.digests import read_parameter
from gac.models.sites import Site, Weight
from gac.models.streaming import on_its_device
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named, scheme_of
from gac.schemes.feedback.order import Inputs

logger = logging.getLogger(__name__)

PRICES = "scheme-3"
"""The name of files of prices; its number changes with their definition."""


@dataclass(frozen=True, eq=False)
class LayerFit:
    """One layer's measurements.

    Attributes:
        losses: loss curves by ``<form>/<weight>``; what rounding a dense weight costs by ``<scheme>/<weight>``, one
            number, and a form by ``<scheme>/<form>/<weight>``; the dense model's loss by ``loss``; tokens of experts by
            ``reached/<weight>``.
        artifacts: what compressing the layer needs.
    """

    losses: Mapping[str, Floats]
    artifacts: LayerArtifacts

    @staticmethod
    def merged(fits: Sequence["LayerFit"]) -> "LayerFit":
        losses = {name: loss for fit in fits for name, loss in fit.losses.items()}
        return LayerFit(losses, _chained(*(fit.artifacts for fit in fits)))


@dataclass(frozen=True, eq=False)
class ModelCurves:
    """The loss curves of a model, and the dense model's mean loss on the calibration text, and on each of several.

    ``reached``: by layer, the sampled tokens that reach each of its routed experts, where these were measured.
    """

    curves: LossCurves
    dense_loss: float
    dense_losses: tuple[float, ...] = ()
    reached: Mapping[int, Floats] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Part:
    """Forms, schemes or inputs that are measured, stored and read as one."""

    name: str
    forms: tuple[Form, ...] = ()
    scheme: Scheme | None = None
    of_experts: bool = False  # of a scheme: routed experts are priced, not linear weights

    @property
    def takes_experts(self) -> bool:
        return self.of_experts or any(form.loss.uses_routed_tokens for form in self.forms)

    @property
    def runs_suffice(self) -> bool:
        """True if the model is run for it, and no moments are needed."""
        return any(isinstance(tensors_of(form), RunForm) for form in self.forms)


_INPUTS = _Part("inputs")
"""The input moments that quantising for the dense model's inputs needs."""
_RunsByPart = Callable[[_Part], ModelRuns | None]
"""Runs the model for a part; None where the part needs no runs."""


def measure_curves(
    run: CalibrationRun,
    sites: Sequence[Site],
    *,
    forms: Sequence[str] = (),
    schemes: Sequence[str] = (),
    rounding: bool = False,
) -> ModelCurves:
    """Calibrate, and measure every form and scheme; arguments and errors as for ``fit_layers``."""
    layers, parts = group_by_layer(sites), _parts((*run.method.forms, *forms), schemes, rounding)
    fits = fit_layers(run, sites, forms=forms, schemes=schemes, rounding=rounding)
    fit, measured = LayerFit.merged([*fits.values()]), [form for part in parts for form in part.forms]
    routed = routed_by_layer(sites)
    weights = [weight for layer in fits for weight in (*layers[layer], *routed.get(layer, ()))]
    named = [(form.name, weight.name) for weight in weights for form in variants_of(measured, weight)]
    losses = {(form, DEFAULT_SCHEME, name): fit.losses.get(f"{form}/{name}") for form, name in named}
    curves = LossCurves({key: LossCurve(loss) for key, loss in losses.items() if loss is not None})
    for scheme in dict.fromkeys(part.scheme for part in parts if part.scheme is not None):
        start = f"{scheme.name}/"
        price = {name.removeprefix(start): loss for name, loss in fit.losses.items() if name.startswith(start)}
        for layer in fits:
            of_layer = [*layers[layer], *routed.get(layer, ())]
            curves = curves.with_scheme(scheme, of_layer, [form_named("dense"), *measured], price)
    if any(form.loss.needs_forward_runs or form.loss.anchors for form in measured):
        curves = with_joint_losses(run, layers, measured, curves, fit.artifacts)
    losses_of_lowest = fits[min(fits)].losses
    names = {layer: f"reached/{weights[-1].name}" for layer, weights in routed.items()}
    reached = {layer: fits[layer].losses[name] for layer, name in names.items() if name in fits[layer].losses}
    return ModelCurves(curves, float(losses_of_lowest["loss"]), tuple(losses_of_lowest["losses"].tolist()), reached)


def fit_layers(
    run: CalibrationRun,
    sites: Sequence[Site],
    *,
    forms: Sequence[str] = (),
    schemes: Sequence[str] = (),
    rounding: bool = False,
) -> dict[int, LayerFit]:
    """Measure what is not stored yet; return what is measured of each layer, the last one first, as it is stored.

    Layers are measured from the last to the first, each written while the next one is measured. Several processes
    return the same: each measures layers of its own (``gac.measurement.calibration.stream_moments``).

    Args:
        sites: whole layers of them, in model order.
        forms: forms that are to be measured beside those that always are.
        schemes: likewise, what rounding to them costs.
        rounding: store the input moments too, which rounding for the dense model's inputs needs.

    Raises:
        ModelError: a statistic is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    parts, weights = _parts((*run.method.forms, *forms), schemes, rounding), group_by_layer(sites)
    missing = run.ranks.once(
        lambda: [
            (index, layer)
            for index, part in enumerate(parts)
            for layer in weights
            if not all(path.exists() for path in _paths(run, part, layer))
        ]
    )
    if missing:
        run.store.check_writable()
        runs_of = _runs_by_part(run, weights)
        steps = [(parts[index], layer) for index, layer in missing]
        if by_runs := [step for step in steps if step[0].runs_suffice]:
            _measure_by_runs(run, weights, by_runs, runs_of)
        if by_moments := [step for step in steps if not step[0].runs_suffice]:
            _measure_by_moments(run, sites, parts, by_moments, runs_of)
    return {layer: _read(run, parts, layer, group[0]) for layer, group in reversed(weights.items())}


def _parts(forms: Sequence[str], schemes: Sequence[str], inputs: bool) -> list[_Part]:
    """List the standard forms as one part, then one part for each other form and each lossy scheme; inputs on request.

    What a form rests upon comes before it, whether it is asked for or not.
    """
    wanted = {each.name: each for form in map(form_named, forms) for each in (form.base_form, form) if each is not None}
    parts = [_Part("standard", tuple(form for form in FORMS if form.loss.in_every_calibration))]
    for form in wanted.values():
        if not form.loss.in_every_calibration and form.name != "dense":
            name = f"{ATTENDED}-{form.name}" if form.loss.uses_attention_curvature else form.name
            parts.append(_Part(name, (form,)))
    rounding = [scheme for scheme in map(scheme_named, dict.fromkeys(schemes)) if scheme.lossy]
    parts += [_INPUTS] if inputs else []
    parts += [_Part(f"{PRICES}-{each.name}", scheme=each) for each in rounding]
    if any(part.takes_experts for part in parts):
        parts += [_Part(f"{PRICES}-experts-{each.name}", scheme=each, of_experts=True) for each in rounding]
    return parts


def _measure_by_runs(
    run: CalibrationRun, weights: Layers, steps: Sequence[tuple[_Part, int]], runs_of: _RunsByPart
) -> None:
    mine = [step for turn, step in enumerate(steps) if run.ranks.owns(turn)]
    for part, layer in progress_bar("leaving out blocks", "layer", steps=mine, shown=run.progress):
        statistics = Statistics(run.model, unseen, run.method, LayerArtifacts({}), runs_of(part))
        fit = fit_layer(statistics, weights[layer], part)
        for path, tensors in _files(run, part, layer, fit).items():
            write_tensors(path, tensors)
    run.ranks.wait()


def _measure_by_moments(
    run: CalibrationRun,
    sites: Sequence[Site],
    parts: Sequence[_Part],
    steps: Sequence[tuple[_Part, int]],
    runs_of: _RunsByPart,
) -> None:
    """Measure parts of layers from their moments; a layer is written while the next one is measured."""
    missing = {layer: [part for part, other in steps if other == layer] for _, layer in steps}
    lacking = [site for site in sites if site.layer in missing]
    weights, routed = group_by_layer(lacking), routed_by_layer(lacking)
    asked = [part for part, _ in steps]
    readers = {reader for part in asked if part.scheme is not None and (reader := part.scheme.input_quantiser)}
    tokens_of = routed if any(part.takes_experts for part in asked) else {}
    if tokens_of:
        check_text_alone(run.windows)
    asking = replace(run, attended=_attends(run, asked), readers=tuple(sorted(readers)), routed=tokens_of)
    stream = (run.source or stream_moments)(asking, lacking)
    logged = not run.progress
    with background_writer() as write:
        for layer, moments in progress_bar("decomposing", "layer", len(missing), stream, run.progress):
            if moments is None:
                continue
            begun, group = time.monotonic(), weights[layer]
            stored = [part for part in parts if part not in missing[layer] and not part.runs_suffice]
            known = _read(run, stored, layer, group[0])
            for part, fit in _fits_of(run, missing[layer], known, group, moments, runs_of, routed.get(layer, ())):
                write(_files(run, part, layer, fit))
            if not logged:
                seconds = -(-len(missing) // run.ranks.count) * (time.monotonic() - begun)
                logger.info("decomposing %d layers, in all their forms: %s", len(missing), rough_duration(seconds))
                logged = True
            moments.tensors.clear()  # before the next layers are summed
    run.ranks.wait()


def _attends(run: CalibrationRun, parts: Sequence[_Part]) -> bool:
    """True if keys and values are measured as attention reads them; the method has to tell gradients apart."""
    return run.method.two_sided and any(form.loss.uses_attention_curvature for part in parts for form in part.forms)


def _fits_of(
    run: CalibrationRun,
    parts: Sequence[_Part],
    known: LayerFit,
    weights: Sequence[Weight],
    moments: LayerMoments,
    runs_of: _RunsByPart,
    routed: Sequence[Weight] = (),
) -> Iterator[tuple[_Part, LayerFit]]:
    """Measure parts of one layer: the forms part by part, the inputs, then all schemes at once.

    ``known`` is what is stored of the layer.
    """
    measured: dict[Weight, Moments] = {}
    if any(form.loss.in_every_calibration for part in parts for form in part.forms):
        measured = moments.of_all(weights, run.method.pooled)

    def pooled(weight: Weight) -> Moments:
        if weight not in measured:
            measured[weight] = moments.of(weight, run.method.pooled)
        return measured[weight]

    attended = partial(moments.attended, pooled=run.method.pooled) if _attends(run, parts) else None
    loss = {"loss": np.array(moments.loss), "losses": moments.losses.cpu().numpy()}
    for part in (part for part in parts if part.scheme is None):
        statistics = Statistics(run.model, pooled, run.method, known.artifacts, runs_of(part), known.losses, attended)
        statistics = replace(statistics, routed=moments.routed)
        if part is _INPUTS:
            tensors: dict[str, Tensor] = {}
            for weight in (weight for weight in weights if f"inputs/{weight.name}" not in known.artifacts.tensors):
                tensors |= _packed_moments(weight, pooled(weight), ("inputs",))
        else:
            tensors = {f"tokens/{weight.name}": moments.tokens(weight) for weight in weights}
            for weight in (weight for weight in weights if weight.to_residual or weight.scores):
                tensors[f"gradients/{weight.name}"] = packed(pooled(weight).gradients)
        fit = fit_layer(statistics, [*weights, *routed] if part.takes_experts else weights, part, tensors)
        fit = LayerFit({**loss, **fit.losses}, fit.artifacts)
        known = LayerFit.merged([known, fit])
        yield part, fit
    if priced := [(part, part.scheme) for part in parts if part.scheme is not None]:
        statistics = Statistics(run.model, pooled, run.method, known.artifacts, routed=moments.routed)
        prices = _prices_of(statistics, weights, [scheme for part, scheme in priced if not part.of_experts])
        for part, scheme in priced:
            price = _price_of_experts(statistics, routed, scheme) if part.of_experts else prices[scheme.name]
            yield part, LayerFit(loss | price, LayerArtifacts({}))


def _prices_of(
    statistics: Statistics, weights: Sequence[Weight], schemes: Sequence[Scheme]
) -> dict[str, dict[str, Floats]]:
    """Price schemes of one layer, nats a token, from what its standard forms have measured.

    By scheme, and then: one number for the dense weight by ``<scheme>/<weight>``, and for a form that prices itself one
    for each dim by ``<scheme>/<form>/<weight>``.
    """
    largest_first = sorted(weights, key=lambda weight: -weight.params)
    matrices = [statistics.model.get_parameter(f"{weight.name}.weight") for weight in largest_first]
    by_weight = at_once(lambda weight: _prices_of_weight(statistics, weight, schemes), largest_first, matrices)
    return {
        scheme.name: {name: loss for prices in by_weight for name, loss in prices[scheme.name].items()}
        for scheme in schemes
    }


def _prices_of_weight(
    statistics: Statistics, weight: Weight, schemes: Sequence[Scheme]
) -> dict[str, dict[str, Floats]]:
    inputs = Inputs(statistics.metric(weight).inputs, thorough=False)  # whose factors all schemes and forms share
    forms = [form for form in FORMS if form.loss.in_every_calibration and form.applies_to(weight)]
    prices: dict[str, dict[str, Floats]] = {scheme.name: {} for scheme in schemes}
    for scheme in (scheme for scheme in schemes if scheme.applies_to(weight)):
        of_scheme, name = prices[scheme.name], scheme.name
        of_scheme[f"{name}/{weight.name}"] = np.array(rounding_loss(statistics, weight, scheme, inputs))
        for form in forms:
            if (by_dim := tensors_of(form).rounding(statistics, weight, scheme, inputs)) is not None:
                of_scheme[f"{name}/{form.name}/{weight.name}"] = by_dim
    return prices


def _price_of_experts(statistics: Statistics, routed: Sequence[Weight], scheme: Scheme) -> dict[str, Floats]:
    """Price a scheme of a layer's routed experts, where it has some and the scheme takes them, likewise."""
    if not routed or not all(scheme_of(scheme, weight).applies_to(weight) for weight in routed):
        return {}
    stack = routed[-1]
    assert statistics.routed is not None, f"the tokens of {stack.name} were not kept"
    chooses, experts = (statistics.model.get_submodule(weight.name) for weight in routed)
    with on_its_device(chooses), on_its_device(experts):
        tokens = statistics.routed(stack).to(next(experts.parameters()).device)
        loss = loss_of_rounded(scheme, experts, chooses, tokens)
    return {f"{scheme.name}/{stack.name}": np.array(loss)}


def rounding_loss(statistics: Statistics, weight: Weight, scheme: Scheme, inputs: Inputs) -> float:
    """Loss of storing the dense weight W in a scheme, nats a token: ``tr(G E A E^T)`` of its quantisation error E.

    Where inputs are rounded too, by errors of variance n that follow nothing else, ``tr(W^T G W diag(n))`` more. To
    first order all of it adds to what a form loses. A form that keeps less of the weight loses no more by rounding.

    ``inputs`` holds A. ModelError if the scheme cannot store the weight's numbers.
    """
    matrix, metric = statistics.matrix(weight), statistics.metric(weight)
    scheme.check_range(matrix, weight.name)
    error = (matrix - scheme.quantised(matrix, inputs, metric.gradients if weight.scores else None)).detach().double()
    lost = float(metric.cost(error))
    if scheme.input_quantiser is not None:
        dense = matrix.detach().double()
        noise = statistics.moments(weight).noise[scheme.input_quantiser].double()
        lost += float(((metric.gradients @ dense) * dense).sum(0) @ noise)
    return FACTOR * lost


def fit_layer(
    statistics: Statistics, weights: Sequence[Weight], part: _Part, tensors: Mapping[str, Tensor] = MappingProxyType({})
) -> LayerFit:
    losses: dict[str, Floats] = {}
    artifacts = dict(tensors)
    statistics = replace(statistics, artifacts=_chained(LayerArtifacts(artifacts), statistics.artifacts))
    matrices = [statistics.model.get_parameter(f"{weight.name}.weight") for weight in weights if not weight.is_routed]
    each = at_once(lambda form: [*tensors_of(form).measure(statistics, weights)], part.forms, matrices)
    for form, fits in zip(part.forms, each, strict=True):
        for fit in fits:
            name = (fit.form or form).name
            losses[f"{name}/{fit.weight.name}"] = fit.loss
            losses |= {} if fit.reached is None else {f"reached/{fit.weight.name}": fit.reached}
            artifacts |= {f"{name}.{key}/{fit.weight.name}": tensor for key, tensor in fit.tensors.items()}
            for weight in (*fit.moments, *fit.inputs):
                names = ("inputs", "gradients") if weight in fit.moments else ("inputs",)
                artifacts |= _packed_moments(weight, statistics.moments(weight), names)
    return LayerFit(losses, LayerArtifacts(artifacts))


def _packed_moments(weight: Weight, moments: Moments, names: Sequence[str]) -> dict[str, Tensor]:
    tensors = {f"{name}/{weight.name}": packed(getattr(moments, name)) for name in names}
    return tensors | {f"scale/{weight.name}": moments.scale}


def _runs_by_part(run: CalibrationRun, weights: Layers) -> _RunsByPart:
    """Return what runs the model for a part, made at the first call; None where the part needs no runs.

    Forms with ``anchors`` are run on the windows that their moments have not seen, if there are such.
    """

    @cache
    def runs_on(held_out: bool) -> ModelRuns:
        windows = run.windows[run.held_out] if held_out else run.windows
        return ModelRuns(run.model, decoder_layers(run.model, weights), windows, [*chain(*weights.values())], held_out)

    def runs_of(part: _Part) -> ModelRuns | None:
        needs_runs = any(form.loss.needs_forward_runs for form in part.forms)
        anchors = (needs_runs or run.method.two_sided) and any(form.loss.anchors for form in part.forms)
        if anchors and run.held_out:
            return runs_on(True)
        return runs_on(False) if needs_runs else None

    return runs_of


def _paths(run: CalibrationRun, part: _Part, layer: int) -> tuple[Path, Path]:
    """Paths of the factors and of the losses; losses are written last, so a part that has them is complete."""
    name = f"{run.method.name}-{part.name}"
    return run.store.path(f"factors-{name}", layer), run.store.path(f"losses-{name}", layer)


def _files(run: CalibrationRun, part: _Part, layer: int, fit: LayerFit) -> dict[Path, Mapping[str, Tensor]]:
    losses = {name: torch.from_numpy(loss) for name, loss in fit.losses.items()}
    return dict(zip(_paths(run, part, layer), (fit.artifacts.tensors, losses), strict=True))


def _read(run: CalibrationRun, parts: Sequence[_Part], layer: int, weight: Weight) -> LayerFit:
    device = read_parameter(run.model, f"{weight.name}.weight").device
    paths = [_paths(run, part, layer) for part in parts]
    return LayerFit.merged(
        [LayerFit(read_arrays(losses), LayerArtifacts(TensorFile(factors, device))) for factors, losses in paths]
    )


def _chained(*parts: LayerArtifacts) -> LayerArtifacts:
    return LayerArtifacts(ChainMap(*(cast(dict[str, Tensor], part.tensors) for part in parts)))
