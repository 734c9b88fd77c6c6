"""From statistics to loss curves: every layer in turn, each weight in every form, kept on disk."""

import logging
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gac.core.arrays import Floats
from gac.core.distributed.ranks import ALONE
from gac.core.linalg import packed
from gac.core.progress import progress_bar, rough_duration
from gac.forms import FORMS, Form, form_named, variants_of
from gac.forms.artifacts import LayerArtifacts
from gac.forms.curvature.metric import Moments
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.tensors import RunForm, Statistics, tensors_of
from gac.measurement.calibration import ATTENDED, CalibrationRun, LayerMoments, decoder_layers, weights_by_layer
from gac.measurement.pairs import with_pairs
from gac.measurement.prices import prices_of
from gac.measurement.runs import ModelRuns, unseen
from gac.measurement.store import TensorFile, background_writer, read_arrays, write_tensors
from gac.measurement.whole_model import calibrated_to_whole_model
from gac.models.loading import read_parameter
from gac.models.sites import Site, Weight
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named

logger = logging.getLogger(__name__)

PRICES = "scheme-3"
"""The name of files of prices; its number changes with their definition."""


@dataclass(frozen=True, eq=False)
class LayerFit:
    """One layer's measurements.

    Attributes:
        losses: loss curves by ``<form>/<weight>``; what rounding a dense weight costs by ``<scheme>/<weight>``, one
            number, and a form by ``<scheme>/<form>/<weight>``; the dense model's loss by ``loss``.
        kept: what compressing the layer needs.
    """

    losses: Mapping[str, Floats]
    kept: LayerArtifacts

    @staticmethod
    def merged(fits: Sequence["LayerFit"]) -> "LayerFit":
        losses = {name: loss for fit in fits for name, loss in fit.losses.items()}
        return LayerFit(losses, _chained(*(fit.kept for fit in fits)))


@dataclass(frozen=True, eq=False)
class ModelCurves:
    """The loss curves of a model, and the dense model's mean loss on the calibration text, nats."""

    curves: LossCurves
    dense_loss: float


@dataclass(frozen=True, eq=False)
class _Part:
    """Forms, schemes or inputs that are measured, stored and read as one."""

    name: str
    forms: tuple[Form, ...] = ()
    scheme: Scheme | None = None

    @property
    def runs_suffice(self) -> bool:
        """True if the model is run for it, and no moments are needed."""
        return any(isinstance(tensors_of(form), RunForm) for form in self.forms)


_INPUTS = _Part("inputs")
"""The input moments that quantising for the dense model's inputs needs."""
_Layers = Mapping[int, Sequence[Weight]]
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
    """Calibrate, and measure every form and scheme; arguments and errors as for ``stream_fits``."""
    weights, parts = weights_by_layer(sites), _parts((*run.method.forms, *forms), schemes, rounding)
    by_key: dict[tuple[str, str, str], LossCurve] = {}
    dense_loss = 0.0
    for layer, fit in stream_fits(run, sites, forms=forms, schemes=schemes, rounding=rounding):
        dense_loss = float(fit.losses["loss"])
        by_key |= _curves(weights[layer], fit, parts).by_key
    measured = [form for part in parts for form in part.forms]
    curves = with_pairs(run, weights, measured, LossCurves(by_key))
    artifacts_of = partial(_artifacts_of, replace(run, ranks=ALONE), sites)
    return ModelCurves(calibrated_to_whole_model(run, weights, measured, curves, artifacts_of), dense_loss)


def stream_fits(
    run: CalibrationRun,
    sites: Sequence[Site],
    *,
    forms: Sequence[str] = (),
    schemes: Sequence[str] = (),
    rounding: bool = False,
) -> Iterator[tuple[int, LayerFit]]:
    """Measure what is not stored yet; then yield ``(layer, what is measured of it)``, read from the store.

    Layers are measured from the last to the first, each written while the next one is measured. Several processes
    yield the same: each measures layers of its own (``gac.measurement.calibration.stream_moments``).

    Args:
        sites: whole layers of them, in model order.
        forms: forms that are to be measured beside those that always are.
        schemes: likewise, what rounding to them costs.
        rounding: whether what rounding for the dense model's inputs needs is kept too.

    Raises:
        ModelError: a statistic is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    parts, weights = _parts((*run.method.forms, *forms), schemes, rounding), weights_by_layer(sites)
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
        _measure_by_runs(run, weights, [step for step in steps if step[0].runs_suffice], runs_of)
        _measure_by_moments(run, sites, parts, [step for step in steps if not step[0].runs_suffice], runs_of)
    for layer, group in reversed(weights.items()):
        yield layer, LayerFit.merged([_read(run, part, layer, group) for part in parts])


def stream_kept(
    run: CalibrationRun, sites: Sequence[Site], forms: Sequence[str], rounding: bool = False
) -> Iterator[tuple[int, LayerArtifacts]]:
    """Yield what compressing needs of each layer; arguments as for ``stream_fits``."""
    return ((layer, fit.kept) for layer, fit in stream_fits(run, sites, forms=forms, rounding=rounding))


def _artifacts_of(run: CalibrationRun, sites: Sequence[Site], form: Form) -> LayerArtifacts:
    return _chained(*(artifacts for _, artifacts in stream_kept(run, sites, [form.name])))


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
    return [*parts, *([_INPUTS] if inputs else []), *(_Part(f"{PRICES}-{each.name}", scheme=each) for each in rounding)]


def _measure_by_runs(
    run: CalibrationRun, weights: _Layers, steps: Sequence[tuple[_Part, int]], runs_of: _RunsByPart
) -> None:
    """Measure the forms that need only runs of the model; each result is written at once."""
    mine = [step for turn, step in enumerate(steps) if run.ranks.owns(turn)]
    for part, layer in progress_bar("leaving out blocks", "layer", steps=mine, shown=run.progress):
        fit = fit_layer(
            Statistics(run.model, unseen, run.method, LayerArtifacts({}), runs_of(part)), weights[layer], part
        )
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
    if not missing:
        return
    lacking = [site for site in sites if site.layer in missing]
    weights = weights_by_layer(lacking)
    stream = replace(run, attended=_attends(run, [part for part, _ in steps])).moments(lacking)
    logged = not run.progress
    with background_writer() as write:
        for layer, moments in progress_bar("decomposing", "layer", len(missing), stream, run.progress):
            if moments is None:
                continue
            begun, group = time.monotonic(), weights[layer]
            stored = [part for part in parts if part not in missing[layer] and not part.runs_suffice]
            known = LayerFit.merged([_read(run, part, layer, group) for part in stored])
            for part, fit in _fits_of(run, missing[layer], known, group, moments, runs_of):
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
) -> Iterator[tuple[_Part, LayerFit]]:
    """Measure parts of one layer: the forms part by part, the inputs, then all schemes at once.

    Args:
        known: what is stored of the layer.
    """
    pooled = cache(partial(moments.of, pooled=run.method.pooled))
    attended = partial(moments.attended, pooled=run.method.pooled) if _attends(run, parts) else None
    loss = {"loss": np.array(moments.loss)}
    for part in (part for part in parts if part.scheme is None):
        statistics = Statistics(run.model, pooled, run.method, known.kept, runs_of(part), known.losses, attended)
        if part is _INPUTS:
            tensors: dict[str, Tensor] = {}
            for weight in (weight for weight in weights if f"inputs/{weight.name}" not in known.kept.tensors):
                tensors |= _packed_moments(weight, pooled(weight), ("inputs",))
        else:
            tensors = {f"tokens/{weight.name}": moments.tokens(weight) for weight in weights}
            for weight in (weight for weight in weights if weight.to_residual or weight.scores):
                tensors[f"gradients/{weight.name}"] = packed(pooled(weight).gradients)
        fit = fit_layer(statistics, weights, part, tensors)
        fit = LayerFit({**loss, **fit.losses}, fit.kept)
        known = LayerFit.merged([known, fit])
        yield part, fit
    schemes = {part.scheme: part for part in parts if part.scheme is not None}
    statistics = Statistics(run.model, pooled, run.method, known.kept)
    prices = prices_of(statistics, weights, [*schemes])
    for scheme, part in schemes.items():
        losses = {f"{scheme.name}/{name}": price for name, price in prices[scheme.name].items()}
        yield part, LayerFit(loss | losses, LayerArtifacts({}))


def fit_layer(
    statistics: Statistics, weights: Sequence[Weight], part: _Part, tensors: Mapping[str, Tensor] = MappingProxyType({})
) -> LayerFit:
    """Measure the weights of one layer in the forms of a part.

    Args:
        statistics: with what was measured before the part.
        tensors: of the layer, stored with those of the forms.
    """
    losses: dict[str, Floats] = {}
    kept = dict(tensors)
    statistics = replace(statistics, kept=_chained(LayerArtifacts(kept), statistics.kept))
    for form in part.forms:
        for fit in tensors_of(form).measure(statistics, weights):
            name = (fit.form or form).name
            losses[f"{name}/{fit.weight.name}"] = fit.loss
            kept |= {f"{name}.{key}/{fit.weight.name}": tensor for key, tensor in fit.tensors.items()}
            for weight in (*fit.moments, *fit.inputs):
                names = ("inputs", "gradients") if weight in fit.moments else ("inputs",)
                kept |= _packed_moments(weight, statistics.moments(weight), names)
    return LayerFit(losses, LayerArtifacts(kept))


def _packed_moments(weight: Weight, moments: Moments, names: Sequence[str]) -> dict[str, Tensor]:
    tensors = {f"{name}/{weight.name}": packed(getattr(moments, name)) for name in names}
    return tensors | {f"scale/{weight.name}": moments.scale}


def _runs_by_part(run: CalibrationRun, weights: _Layers) -> _RunsByPart:
    """Return what runs the model for a part, made at the first call; None where the part needs no runs.

    Forms with ``anchors`` are run on the windows that their moments have not seen, if there are such.
    """

    @cache
    def runs_on(held_out: bool) -> ModelRuns:
        windows = run.windows[run.held_out] if held_out else run.windows
        return ModelRuns(run.model, decoder_layers(run.model, weights), windows, [*chain(*weights.values())], held_out)

    def runs_of(part: _Part) -> ModelRuns | None:
        if any(form.loss.needs_forward_runs for form in part.forms):
            return runs_on(False)
        anchors = run.method.two_sided and any(form.loss.anchors for form in part.forms)
        return runs_on(True) if anchors and run.held_out else None

    return runs_of


def _paths(run: CalibrationRun, part: _Part, layer: int) -> tuple[Path, Path]:
    """Paths of the factors and of the losses; losses are written last, so a part that has them is complete."""
    name = f"{run.method.name}-{part.name}"
    return run.store.path(f"factors-{name}", layer), run.store.path(f"losses-{name}", layer)


def _files(run: CalibrationRun, part: _Part, layer: int, fit: LayerFit) -> dict[Path, Mapping[str, Tensor]]:
    losses = {name: torch.from_numpy(loss) for name, loss in fit.losses.items()}
    return dict(zip(_paths(run, part, layer), (fit.kept.tensors, losses), strict=True))


def _read(run: CalibrationRun, part: _Part, layer: int, weights: Sequence[Weight]) -> LayerFit:
    factors, losses = _paths(run, part, layer)
    device = read_parameter(run.model, f"{weights[0].name}.weight").device
    return LayerFit(read_arrays(losses), LayerArtifacts(TensorFile(factors, device)))


def _chained(*parts: LayerArtifacts) -> LayerArtifacts:
    return LayerArtifacts(ChainMap(*(cast(dict[str, Tensor], part.tensors) for part in parts)))


def _curves(weights: Sequence[Weight], fit: LayerFit, parts: Sequence[_Part]) -> LossCurves:
    forms = [form for part in parts for form in part.forms]
    by_key: dict[tuple[str, str, str], LossCurve] = {}
    for weight in weights:
        for form in variants_of(forms, weight):
            if (name := f"{form.name}/{weight.name}") in fit.losses:
                by_key[form.name, DEFAULT_SCHEME, weight.name] = LossCurve(fit.losses[name])
    curves = LossCurves(by_key)
    for scheme in (part.scheme for part in parts if part.scheme is not None):
        start = f"{scheme.name}/"
        price = {name.removeprefix(start): loss for name, loss in fit.losses.items() if name.startswith(start)}
        curves = curves.with_scheme(scheme, weights, [form_named("dense"), *forms], price)
    return curves
