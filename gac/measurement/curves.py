"""From statistics to loss curves: every layer in turn, each weight in every form, kept on disk."""

import logging
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, groupby
from pathlib import Path
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
from gac.forms.curvature.methods import Method
from gac.forms.curvature.metric import Moments
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.tensors import Fit, RunForm, Statistics, tensors_of
from gac.measurement.calibration import ATTENDED, CalibrationRun, LayerMoments, decoder_layers
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
    inputs: bool = False

    @property
    def runs(self) -> bool:
        """True if the model is run for it."""
        return any(form.loss.needs_forward_runs for form in self.forms)

    @property
    def unseen(self) -> bool:
        """True if runs of the model suffice, and no moments are needed."""
        return any(isinstance(tensors_of(form), RunForm) for form in self.forms)


RunsByPart = Callable[[_Part], ModelRuns | None]
"""Runs the model for a part; None where the part needs no runs."""


def fit_layer(statistics: Statistics, sites: Sequence[Site], moments: LayerMoments, part: _Part) -> LayerFit:
    """Measure the weights of one layer's sites in the forms of a part.

    Args:
        statistics: of the layer, with what the parts before this one have kept.
        moments: on two halves of the text.

    Raises:
        ModelError: a statistic is not finite.
    """
    weights, pooled = _weights_of(sites), statistics.moments
    losses: dict[str, Floats] = {"loss": np.array(moments.loss)}
    tensors: dict[str, Tensor] = {}
    statistics = replace(statistics, kept=_chained(LayerArtifacts(tensors), statistics.kept))
    for weight in weights:
        tensors[f"tokens/{weight.name}"] = moments.tokens(weight)
        if weight.to_residual or weight.scores:
            tensors[f"gradients/{weight.name}"] = packed(pooled(weight).gradients)
    for form, fit in _fits(statistics, weights, part.forms):
        losses[f"{form.name}/{fit.weight.name}"] = fit.loss
        tensors |= _artifacts(form, fit)
        for weight in (*fit.moments, *fit.inputs):
            names = ("inputs", "gradients") if weight in fit.moments else ("inputs",)
            tensors |= _packed_moments(weight, pooled(weight), names)
    return LayerFit(losses, LayerArtifacts(tensors))


def keep_inputs(statistics: Statistics, sites: Sequence[Site], moments: LayerMoments) -> LayerFit:
    """Collect the input moments that quantising for the dense model's inputs needs and that are not stored yet."""
    tensors: dict[str, Tensor] = {}
    for weight in _weights_of(sites):
        if f"inputs/{weight.name}" not in statistics.kept.tensors:
            tensors |= _packed_moments(weight, statistics.moments(weight), ("inputs",))
    return LayerFit({"loss": np.array(moments.loss)}, LayerArtifacts(tensors))


def run_layer(runs: ModelRuns, method: Method, weights: Sequence[Weight], forms: Sequence[Form]) -> LayerFit:
    """Measure the weights of one layer in forms for which the model is run.

    Raises:
        ModelError: a loss is not finite.
    """
    fits = list(_fits(Statistics(runs.model, unseen, method, LayerArtifacts({}), runs), weights, forms))
    losses = {f"{form.name}/{fit.weight.name}": fit.loss for form, fit in fits}
    return LayerFit(
        losses, LayerArtifacts({name: tensor for form, fit in fits for name, tensor in _artifacts(form, fit).items()})
    )


def _fits(statistics: Statistics, weights: Sequence[Weight], forms: Sequence[Form]) -> Iterator[tuple[Form, Fit]]:
    return ((fit.form or form, fit) for form in forms for fit in tensors_of(form).measure(statistics, weights))


def _artifacts(form: Form, fit: Fit) -> dict[str, Tensor]:
    return {f"{form.name}.{name}/{fit.weight.name}": tensor for name, tensor in fit.tensors.items()}


def _packed_moments(weight: Weight, moments: Moments, names: Sequence[str]) -> dict[str, Tensor]:
    tensors = {f"{name}/{weight.name}": packed(getattr(moments, name)) for name in names}
    return tensors | {f"scale/{weight.name}": moments.scale}


def measure_curves(
    run: CalibrationRun,
    sites: Sequence[Site],
    *,
    forms: Sequence[str] = (),
    schemes: Sequence[str] = (),
    rounding: bool = False,
) -> ModelCurves:
    """Calibrate, and measure every form and scheme; layers that are in the store are read.

    Args:
        forms, schemes, rounding: as for ``stream_fits``.

    Raises:
        ModelError: a statistic is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    layers = {layer: list(group) for layer, group in groupby(sites, key=lambda site: site.layer)}
    parts = _parts((*run.method.forms, *forms), schemes, rounding)
    by_key: dict[tuple[str, str, str], LossCurve] = {}
    dense_loss = 0.0
    for layer, fit in stream_fits(run, sites, forms=forms, schemes=schemes, rounding=rounding):
        dense_loss = float(fit.losses["loss"])
        by_key |= _curves(layers[layer], fit, parts).by_key
    curves = LossCurves(by_key)
    weights = {layer: _weights_of(group) for layer, group in layers.items()}
    measured = [form for part in parts for form in part.forms]
    curves = with_pairs(run, weights, measured, curves)
    curves = calibrated_to_whole_model(
        run, weights, measured, curves, partial(_artifacts_of, replace(run, ranks=ALONE), sites)
    )
    return ModelCurves(curves, dense_loss)


def stream_fits(
    run: CalibrationRun,
    sites: Sequence[Site],
    *,
    forms: Sequence[str] = (),
    schemes: Sequence[str] = (),
    rounding: bool = False,
) -> Iterator[tuple[int, LayerFit]]:
    """Yield ``(layer, what is measured of it)``: the layers in the store, then the others, from the last to the first.

    A layer is written while the next one is measured. Several processes yield the same: each measures layers of its
    own (``gac.measurement.calibration.stream_moments``), and once all are written, they are read from the store.

    Args:
        sites: whole layers of them, in model order.
        forms: forms that are to be measured beside those that always are.
        schemes: likewise, what rounding to them costs.
        rounding: whether what rounding for the dense model's inputs needs is kept too.

    Raises:
        ModelError: a statistic is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    every = _parts((*run.method.forms, *forms), schemes, rounding)
    by_layer = {layer: list(group) for layer, group in groupby(sites, key=lambda site: site.layer)}
    runs_of = _runs_by_part(run, by_layer)
    by_runs = _measured_by_runs(run, by_layer, [part for part in every if part.unseen], runs_of)
    parts = [part for part in every if not part.unseen]
    missing = _missing(run, parts, by_layer)
    for layer in [layer for layer, lacking in missing.items() if not lacking]:
        yield layer, _merged(_read(run, parts, layer, by_layer.pop(layer)) + by_runs[layer])
    if not by_layer:
        return
    wanted = [site for group in by_layer.values() for site in group]
    if run.store is not None:
        run.store.check_writable()
    several = run.ranks.count > 1
    assert run.store is not None or not several, "processes find in the store what others have measured"
    lacking = [part for parts in missing.values() for part in parts]
    stream = replace(run, attended=_attends(run, lacking)).moments(wanted)
    tell = _log_eta_after_first_layer(run, len(by_layer))
    with background_writer() as write:
        for layer, moments in progress_bar("decomposing", "layer", len(by_layer), stream, run.progress):
            if moments is None:
                continue
            begun = time.monotonic()
            fits = _read(run, [part for part in parts if part not in missing[layer]], layer, by_layer[layer])
            for part, fit in _fits_of(run, missing[layer], _merged(fits), by_layer[layer], moments, runs_of):
                fits.append(fit)
                if run.store is not None:
                    write(_files(run, part, layer, fit))
            tell(time.monotonic() - begun)
            if several:
                moments.tensors.clear()  # before the next layers are summed
            else:
                yield layer, _merged(fits + by_runs[layer])
    run.ranks.wait()
    for layer in sorted(by_layer, reverse=True) if several else ():
        yield layer, _merged(_read(run, parts, layer, by_layer[layer]) + by_runs[layer])


def _log_eta_after_first_layer(run: CalibrationRun, layers: int) -> Callable[[float], None]:
    mine, logged = -(-layers // run.ranks.count), not run.progress

    def tell(seconds: float) -> None:
        nonlocal logged
        if not logged:
            logger.info("decomposing %d layers, in all their forms: %s", layers, rough_duration(mine * seconds))
        logged = True

    return tell


def stream_kept(
    run: CalibrationRun, sites: Sequence[Site], forms: Sequence[str], rounding: bool = False
) -> Iterator[tuple[int, LayerArtifacts]]:
    """Yield what compressing needs of each layer; arguments as for ``stream_fits``."""
    return ((layer, fit.kept) for layer, fit in stream_fits(run, sites, forms=forms, rounding=rounding))


def _artifacts_of(run: CalibrationRun, sites: Sequence[Site], form: Form) -> LayerArtifacts:
    return _chained(*(artifacts for _, artifacts in stream_kept(run, sites, [form.name])))


def _attends(run: CalibrationRun, parts: Sequence[_Part]) -> bool:
    """True if keys and values are measured as attention reads them; the method has to tell gradients apart."""
    return run.method.two_sided and any(form.loss.uses_attention_curvature for part in parts for form in part.forms)


def _missing(run: CalibrationRun, parts: Sequence[_Part], layers: Iterable[int]) -> dict[int, list[_Part]]:
    """List by layer the parts that are not stored, as rank 0 sees it."""

    def lacking_parts() -> dict[int, list[int]]:
        return {
            layer: [index for index, part in enumerate(parts) if not _is_stored(run, part, layer)] for layer in layers
        }

    return {layer: [parts[index] for index in lacking] for layer, lacking in run.ranks.once(lacking_parts).items()}


def _fits_of(
    run: CalibrationRun,
    parts: Sequence[_Part],
    known: LayerFit,
    sites: Sequence[Site],
    moments: LayerMoments,
    runs_of: RunsByPart,
) -> Iterator[tuple[_Part, LayerFit]]:
    """Measure parts of one layer: the forms part by part, the inputs, then all schemes at once."""
    pooled = cache(partial(moments.of, pooled=run.method.pooled))
    attended = partial(moments.attended, pooled=run.method.pooled) if _attends(run, parts) else None
    for part in (part for part in parts if part.scheme is None):
        statistics = Statistics(run.model, pooled, run.method, known.kept, runs_of(part), known.losses, attended)
        fit = keep_inputs(statistics, sites, moments) if part.inputs else fit_layer(statistics, sites, moments, part)
        known = _merged([known, fit])
        yield part, fit
    schemes = {part.scheme.name: part for part in parts if part.scheme is not None}
    statistics = Statistics(run.model, pooled, run.method, known.kept)
    prices = prices_of(statistics, _weights_of(sites), [part.scheme for part in schemes.values() if part.scheme])
    for scheme, price in prices.items():
        losses = {f"{scheme}/{name}": loss for name, loss in price.items()}
        yield schemes[scheme], LayerFit({"loss": np.array(moments.loss)} | losses, LayerArtifacts({}))


def _measured_by_runs(
    run: CalibrationRun,
    by_layer: Mapping[int, Sequence[Site]],
    parts: Sequence[_Part],
    runs_of: RunsByPart,
) -> dict[int, list[LayerFit]]:
    """Measure the forms that need only runs of the model, by layer; each result is written at once."""
    missing = _missing(run, parts, by_layer)
    todo = [(part, layer) for part in parts for layer in by_layer if part in missing[layer]]
    stored = {layer: [part for part in parts if (part, layer) not in todo] for layer in by_layer}
    fits = {layer: _read(run, stored[layer], layer, group) for layer, group in by_layer.items()}
    if not todo:
        return fits
    if run.store is not None:
        run.store.check_writable()
    mine = [step for turn, step in enumerate(todo) if run.ranks.owns(turn)]
    _log_runs(mine, by_layer, runs_of)
    for part, layer in progress_bar("leaving out blocks", "layer", steps=mine, shown=run.progress):
        runs = runs_of(part)
        assert runs is not None, f"{part.name} is measured by running the model"
        fits[layer].append(run_layer(runs, run.method, _weights_of(by_layer[layer]), part.forms))
        if run.store is not None:
            for path, tensors in _files(run, part, layer, fits[layer][-1]).items():
                write_tensors(path, tensors)
    run.ranks.wait()
    for part, layer in (step for step in todo if step not in mine):
        fits[layer] += _read(run, [part], layer, by_layer[layer])
    return fits


def _log_runs(steps: Sequence[tuple[_Part, int]], by_layer: Mapping[int, Sequence[Site]], runs_of: RunsByPart) -> None:
    if not steps:
        return
    begun = time.monotonic()
    runs_of(steps[0][0])
    seconds, forms = time.monotonic() - begun, {form.name: form for part, _ in steps for form in part.forms}
    taken = [(form, weight) for part, layer in steps for form in part.forms for weight in _weights_of(by_layer[layer])]
    runs = sum(form.full(weight) - form.min_dim for form, weight in taken if form.shortens(weight) == "in")
    logger.info(
        "running the model %d times to find what %s loses: %s; other forms= (--form) leave that out",
        runs,
        " and ".join(forms),
        rough_duration(runs * seconds / 2),  # from the layer that changes on: half of the layers on average
    )


def _runs_by_part(run: CalibrationRun, by_layer: Mapping[int, Sequence[Site]]) -> RunsByPart:
    """Return what runs the model for a part, made at the first call; None where the part needs no runs.

    Forms with ``anchors`` are run on the windows that their moments have not seen, if there are such.
    """
    every = cache(partial(_runs_of, run, by_layer, run.windows, False))
    held_out = cache(partial(_runs_of, run, by_layer, run.windows[run.held_out], True))

    def runs_of(part: _Part) -> ModelRuns | None:
        if part.runs:
            return every()
        anchors = run.method.two_sided and any(form.loss.anchors for form in part.forms)
        return held_out() if anchors and run.held_out else None

    return runs_of


def _runs_of(run: CalibrationRun, by_layer: Mapping[int, Sequence[Site]], windows: Tensor, every: bool) -> ModelRuns:
    weights = {layer: _weights_of(group) for layer, group in by_layer.items()}
    return ModelRuns(run.model, decoder_layers(run.model, weights), windows, [*chain(*weights.values())], every)


def _weights_of(sites: Sequence[Site]) -> list[Weight]:
    return [weight for site in sites for weight in site.weights]


def _parts(forms: Sequence[str], schemes: Sequence[str], inputs: bool) -> list[_Part]:
    """List the standard forms as one part, then one part for each other form and each lossy scheme; inputs on request.

    What a form rests upon comes before it, whether it is asked for or not.
    """
    wanted = {each.name: each for form in map(form_named, forms) for each in (form.base_form, form) if each is not None}
    others = [form for form in wanted.values() if not form.loss.in_every_calibration and form.name != "dense"]
    rounding = [scheme for scheme in map(scheme_named, dict.fromkeys(schemes)) if scheme.lossy]
    return [
        _Part("standard", tuple(form for form in FORMS if form.loss.in_every_calibration)),
        *(
            _Part(f"{ATTENDED}-{form.name}" if form.loss.uses_attention_curvature else form.name, (form,))
            for form in others
        ),
        *([_Part("inputs", inputs=True)] if inputs else []),
        *(_Part(f"{PRICES}-{scheme.name}", scheme=scheme) for scheme in rounding),
    ]


def _paths(run: CalibrationRun, part: _Part, layer: int) -> tuple[Path, Path]:
    """Paths of the factors and of the losses; losses are written last, so a part that has them is complete."""
    assert run.store is not None
    name = f"{run.method.name}-{part.name}"
    return run.store.measured(f"factors-{name}", layer), run.store.measured(f"losses-{name}", layer)


def _files(run: CalibrationRun, part: _Part, layer: int, fit: LayerFit) -> dict[Path, Mapping[str, Tensor]]:
    losses = {name: torch.from_numpy(loss) for name, loss in fit.losses.items()}
    return dict(zip(_paths(run, part, layer), (fit.kept.tensors, losses), strict=True))


def _is_stored(run: CalibrationRun, part: _Part, layer: int) -> bool:
    return run.store is not None and all(path.exists() for path in _paths(run, part, layer))


def _read(run: CalibrationRun, parts: Sequence[_Part], layer: int, sites: Sequence[Site]) -> list[LayerFit]:
    files = [_paths(run, part, layer) for part in parts] if run.store else []
    device = read_parameter(run.model, f"{sites[0].weights[0].name}.weight").device
    return [LayerFit(read_arrays(losses), LayerArtifacts(TensorFile(factors, device))) for factors, losses in files]


def _merged(fits: Sequence[LayerFit]) -> LayerFit:
    losses = {name: loss for fit in fits for name, loss in fit.losses.items()}
    return LayerFit(losses, _chained(*(fit.kept for fit in fits)))


def _chained(*parts: LayerArtifacts) -> LayerArtifacts:
    return LayerArtifacts(ChainMap(*(cast(dict[str, Tensor], part.tensors) for part in parts)))


def _curves(sites: Sequence[Site], fit: LayerFit, parts: Sequence[_Part]) -> LossCurves:
    forms = [form for part in parts for form in part.forms]
    weights = _weights_of(sites)
    curves = LossCurves(
        {
            (form.name, DEFAULT_SCHEME, weight.name): LossCurve(fit.losses[name])
            for weight in weights
            for form in variants_of(forms, weight)
            if (name := f"{form.name}/{weight.name}") in fit.losses
        }
    )
    for scheme in (part.scheme for part in parts if part.scheme is not None):
        start = f"{scheme.name}/"
        price = {name.removeprefix(start): loss for name, loss in fit.losses.items() if name.startswith(start)}
        curves = curves.with_scheme(scheme, weights, [form_named("dense"), *forms], price)
    return curves
