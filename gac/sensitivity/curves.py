"""Loss curves and factors of every site of a model, layer by layer, kept on disk."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from gac.curves import LossCurve, LossCurves
from gac.forms import FORMS, Form, form_named
from gac.forms.tensors import Kept
from gac.models.loading import read_parameter
from gac.models.sites import Site
from gac.schemes import DEFAULT_SCHEME, Scheme, scheme_named
from gac.sensitivity.calibration import LayerMoments, stream_moments
from gac.sensitivity.layer_fit import LayerFit, fit_layer
from gac.sensitivity.methods import Method
from gac.sensitivity.store import StatisticsStore, TensorFile, background_writer, read_arrays

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
    parts = _parts((*method.forms, *forms), schemes)
    by_key: dict[tuple[str, str, str], LossCurve] = {}
    dense_loss = 0.0
    for layer, fit in stream_fits(
        model, sites, windows, method, store, forms=forms, schemes=schemes, source=source, progress=progress
    ):
        dense_loss = float(fit.losses["loss"])
        by_key |= _curves(layers[layer], fit, parts).by_key
    return ModelCurves(LossCurves(by_key), dense_loss)


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
        yield layer, _together(_read(store, method, parts, layer, _device(model, by_layer.pop(layer))))
    if not by_layer:
        return
    wanted = [site for group in by_layer.values() for site in group]
    stream = (
        source(wanted)
        if source is not None
        else stream_moments(model, wanted, windows, power=method.power, store=store, progress=progress)
    )
    with background_writer() as write:
        for layer, moments in tqdm(stream, "decomposing", len(by_layer), unit="layer", disable=not progress):
            fits = []
            for part in missing[layer]:
                fits.append(fit_layer(model, by_layer[layer], moments, method, part.forms, part.schemes))
                if store is not None:
                    losses = {name: torch.from_numpy(loss) for name, loss in fits[-1].losses.items()}
                    write(dict(zip(_paths(store, method, part, layer), (fits[-1].kept.tensors, losses), strict=True)))
            kept = [part for part in parts if part not in missing[layer]]
            yield layer, _together(fits + _read(store, method, kept, layer, _device(model, by_layer[layer])))


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


def _paths(store: StatisticsStore, method: Method, part: _Part, layer: int) -> tuple[Path, Path]:
    """Of the factors and of the losses, which are written last: a part with losses is whole."""
    factors, losses = (store.measured(f"{what}-{method.name}-{part.name}", layer) for what in ("factors", "losses"))
    return factors, losses


def _is_kept(store: StatisticsStore | None, method: Method, part: _Part, layer: int) -> bool:
    return store is not None and all(path.exists() for path in _paths(store, method, part, layer))


def _read(
    store: StatisticsStore | None, method: Method, parts: Sequence[_Part], layer: int, device: torch.device
) -> list[LayerFit]:
    files = [_paths(store, method, part, layer) for part in parts] if store else []
    return [LayerFit(read_arrays(losses), Kept(TensorFile(factors, device))) for factors, losses in files]


def _together(fits: Sequence[LayerFit]) -> LayerFit:
    losses = {name: loss for fit in fits for name, loss in fit.losses.items()}
    return LayerFit(losses, Kept(ChainMap(*(cast(dict[str, Tensor], fit.kept.tensors) for fit in fits))))


def _curves(sites: Sequence[Site], fit: LayerFit, parts: Sequence[_Part]) -> LossCurves:
    """Those of one layer."""
    forms = [form for part in parts for form in part.forms]
    weights = [weight for site in sites for weight in site.weights]
    found = LossCurves(
        {
            (form.name, DEFAULT_SCHEME, weight.name): LossCurve(fit.losses[name])
            for form in forms
            for weight in weights
            if (name := f"{form.name}/{weight.name}") in fit.losses
        }
    )
    for scheme in (scheme for part in parts for scheme in part.schemes):
        keys = {weight.name: f"{scheme.name}/{weight.name}" for weight in weights}
        price = {name: float(fit.losses[key]) for name, key in keys.items() if key in fit.losses}
        found = found.with_scheme(scheme, weights, [form_named("dense"), *forms], price)
    return found


def _device(model: nn.Module, sites: Sequence[Site]) -> torch.device:
    return read_parameter(model, f"{sites[0].weights[0].name}.weight").device
