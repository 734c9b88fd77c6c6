"""Loss curves and factors of every site of a model, layer by layer, kept on disk."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from gac.arrays import Floats
from gac.curves import LossCurve, LossCurves
from gac.forms import FORMS, Form, form_named
from gac.forms.tensors import Kept
from gac.models.loading import read_parameter
from gac.models.sites import Site
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named
from gac.sensitivity.calibration import LayerMoments, stream_moments
from gac.sensitivity.layer_fit import LayerFit, fit_layer
from gac.sensitivity.methods import Method
from gac.sensitivity.store import StatisticsStore, TensorFile, Writer, background_writer, read_arrays

Source = Callable[[Sequence[Site]], Iterator[tuple[int, LayerMoments]]]
"""Streams the moments of some sites' layers, from the last layer to the first, as ``stream_moments`` does."""


@dataclass(frozen=True, eq=False)
class ModelCurves:
    """The loss curves of a model, and the dense model's mean loss on the calibration text, nats."""

    curves: LossCurves
    dense_loss: float


def measure_curves(
    model: nn.Module,
    sites: Sequence[Site],
    windows: Tensor,
    method: Method,
    store: StatisticsStore | None,
    *,
    forms: Sequence[str] = (),
    schemes: Sequence[str] = (),
    source: Source | None = None,
    progress: bool = True,
) -> ModelCurves:
    """Calibrate, and measure every form and scheme; layers that are in the store are read.

    Args:
        windows: calibration token ids, int64, shape ``(windows, tokens)``.
        forms, schemes, source: as for ``stream_fits``.

    Raises:
        ModelError: a statistic is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    layers = {layer: list(group) for layer, group in groupby(sites, key=lambda site: site.layer)}
    curves, dense_loss = LossCurves({}), 0.0
    fits = stream_fits(
        model, sites, windows, method, store, forms=forms, schemes=schemes, source=source, progress=progress
    )
    for layer, fit in fits:
        dense_loss = float(fit.losses["loss"])
        curves = LossCurves({**curves.by_key, **_curves(layers[layer], fit, (*method.forms, *forms), schemes).by_key})
    return ModelCurves(curves, dense_loss)


def stream_fits(
    model: nn.Module,
    sites: Sequence[Site],
    windows: Tensor,
    method: Method,
    store: StatisticsStore | None,
    *,
    forms: Sequence[str] = (),
    schemes: Sequence[str] = (),
    source: Source | None = None,
    progress: bool = True,
) -> Iterator[tuple[int, LayerFit]]:
    """Yield ``(layer, what is measured of it)``: the layers in the store, then the others, from the last to the first.

    A layer is written while the next one is measured.

    Args:
        sites: whole layers of them, in model order.
        windows: calibration token ids, int64, shape ``(windows, tokens)``.
        forms: forms that are to be measured beside those that always are.
        schemes: likewise, what rounding to them costs.
        source: asked once for the moments of the layers that are not in the store; None takes the model's own.

    Raises:
        ModelError: a statistic is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    parts = _parts((*method.forms, *forms), schemes)
    by_layer = {layer: list(group) for layer, group in groupby(sites, key=lambda site: site.layer)}
    missing = {layer: [part for part in parts if not _is_kept(store, method, part, layer)] for layer in by_layer}
    for layer in [layer for layer, lacking in missing.items() if not lacking]:
        yield layer, _read(store, method, parts, layer, _device(model, by_layer.pop(layer)))
    if not by_layer:
        return
    wanted = [site for group in by_layer.values() for site in group]
    stream = (
        source(wanted)
        if source is not None
        else stream_moments(model, wanted, windows, power=method.power, store=store, progress=progress)
    )
    with background_writer() as writer:
        for layer, moments in tqdm(stream, "decomposing", len(by_layer), unit="layer", disable=not progress):
            fits = []
            for part in missing[layer]:
                fits.append(fit_layer(model, by_layer[layer], moments, method, part.forms, part.schemes))
                if store is not None:
                    _keep(writer, store, method, part, layer, fits[-1])
            kept = [part for part in parts if part not in missing[layer]]
            if kept:
                fits.append(_read(store, method, kept, layer, _device(model, by_layer[layer])))
            yield layer, _together(fits)


@dataclass(frozen=True, eq=False)
class _Part:
    """What is measured, kept and found again together."""

    name: str
    forms: tuple[Form, ...] = ()
    schemes: tuple[Scheme, ...] = ()


def _parts(forms: Sequence[str], schemes: Sequence[str]) -> list[_Part]:
    """The standard forms, and one part for each other form and for each scheme that rounds."""
    own = [form for form in map(form_named, dict.fromkeys(forms)) if not form.standard and form.name != "dense"]
    rounding = [scheme for scheme in map(scheme_named, dict.fromkeys(schemes)) if scheme.lossy]
    return [
        _Part("standard", tuple(form for form in FORMS if form.standard)),
        *(_Part(form.name, (form,)) for form in own),
        *(_Part(f"scheme-{scheme.name}", (), (scheme,)) for scheme in rounding),
    ]


def _is_kept(store: StatisticsStore | None, method: Method, part: _Part, layer: int) -> bool:
    if store is None:
        return False
    files = store.losses(method.name, part.name, layer), store.factors(method.name, part.name, layer)
    return all(path.exists() for path in files)


def _read(
    store: StatisticsStore | None, method: Method, parts: Sequence[_Part], layer: int, device: torch.device
) -> LayerFit:
    assert store is not None
    return _together(
        [
            LayerFit(
                read_arrays(store.losses(method.name, part.name, layer)),
                Kept(TensorFile(store.factors(method.name, part.name, layer), device)),
            )
            for part in parts
        ]
    )


def _together(fits: Sequence[LayerFit]) -> LayerFit:
    if len(fits) == 1:
        return fits[0]
    losses: dict[str, Floats] = {}
    for fit in fits:
        losses |= fit.losses
    return LayerFit(losses, Kept(ChainMap(*(cast(dict[str, Tensor], fit.kept.tensors) for fit in fits))))


def _keep(writer: Writer, store: StatisticsStore, method: Method, part: _Part, layer: int, fit: LayerFit) -> None:
    """The losses are written last: a part with losses is whole."""
    losses = {name: torch.from_numpy(loss) for name, loss in fit.losses.items()}
    paths = store.factors(method.name, part.name, layer), store.losses(method.name, part.name, layer)
    writer.write(dict(zip(paths, (fit.kept.tensors, losses), strict=True)))


def _curves(sites: Sequence[Site], fit: LayerFit, forms: Sequence[str], schemes: Sequence[str]) -> LossCurves:
    """Those of one layer."""
    parts = _parts(forms, schemes)
    measured = [form for part in parts for form in part.forms]
    weights = [weight for site in sites for weight in site.weights]
    found = LossCurves(
        {
            (form.name, DEFAULT_SCHEME, weight.name): LossCurve(fit.losses[f"{form.name}/{weight.name}"])
            for form in measured
            for weight in weights
            if f"{form.name}/{weight.name}" in fit.losses
        }
    )
    for scheme in (scheme for part in parts for scheme in part.schemes):
        names = [weight.name for weight in weights if f"{scheme.name}/{weight.name}" in fit.losses]
        price = {name: float(fit.losses[f"{scheme.name}/{name}"]) for name in names}
        found = found.with_scheme(scheme, weights, [form_named("dense"), *measured], price)
    return found


def _device(model: nn.Module, sites: Sequence[Site]) -> torch.device:
    return read_parameter(model, f"{sites[0].weights[0].name}.weight").device
