"""Loss curves and factors of every site of a model, layer by layer, kept on disk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from tqdm import tqdm

from gac.arrays import Floats
from gac.curves import LossCurve, SiteCurves
from gac.models.loading import read_parameter
from gac.models.sites import Site
from gac.sensitivity.calibration import LayerMoments, stream_moments
from gac.sensitivity.factors import LayerFactors, LayerFit, fit_layer
from gac.sensitivity.methods import Method
from gac.sensitivity.store import StatisticsStore, TensorFile, Writer, background_writer, read_arrays

Source = Callable[[Sequence[Site]], Iterator[tuple[int, LayerMoments]]]
"""Streams the moments of some sites' layers, from the last layer to the first, as ``stream_moments`` does."""


@dataclass(frozen=True, eq=False)
class ModelCurves:
    """The curves of every site in model order, and the dense model's mean loss on the calibration text, nats."""

    sites: tuple[SiteCurves, ...]
    dense_loss: float


def measure_curves(
    model: nn.Module,
    sites: Sequence[Site],
    windows: Tensor,
    method: Method,
    store: StatisticsStore | None,
    *,
    source: Source | None = None,
    progress: bool = True,
) -> ModelCurves:
    """Calibrate, decompose every weight, order neurons and value dims; layers that are in the store are read.

    Args:
        windows: calibration token ids, int64, shape ``(windows, tokens)``.
        source: as for ``stream_fits``.

    Raises:
        ModelError: a statistic is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    fits = stream_fits(model, sites, windows, method, store, source=source, progress=progress)
    losses = {layer: fit.losses for layer, fit in fits}
    return ModelCurves(
        tuple(_site_curves(site, losses[site.layer]) for site in sites), float(losses[sites[0].layer]["loss"])
    )


def stream_fits(
    model: nn.Module,
    sites: Sequence[Site],
    windows: Tensor,
    method: Method,
    store: StatisticsStore | None,
    *,
    source: Source | None = None,
    progress: bool = True,
) -> Iterator[tuple[int, LayerFit]]:
    """Yield ``(layer, curves and factors)``: the layers in the store, then the others, measured from last to first.

    A layer is written while the next one is measured.

    Args:
        sites: whole layers of them, in model order.
        windows: calibration token ids, int64, shape ``(windows, tokens)``.
        source: asked once for the moments of the layers that are not in the store; None takes the model's own.

    Raises:
        ModelError: a statistic is not finite.
        StatisticsError: what is kept cannot be written or read.
    """
    by_layer = {layer: list(group) for layer, group in groupby(sites, key=lambda site: site.layer)}
    for layer in [layer for layer in by_layer if store and _is_kept(store, method, layer)]:
        assert store is not None
        yield layer, _read(store, method, layer, _device(model, by_layer.pop(layer)))
    if not by_layer:
        return
    missing = [site for group in by_layer.values() for site in group]
    stream = (
        source(missing)
        if source is not None
        else stream_moments(model, missing, windows, power=method.power, store=store, progress=progress)
    )
    with background_writer() as writer:
        for layer, moments in tqdm(stream, "decomposing", len(by_layer), unit="layer", disable=not progress):
            fit = fit_layer(model, by_layer[layer], moments, method)
            if store is not None:
                _keep(writer, store, method, layer, fit)
            yield layer, fit


def _is_kept(store: StatisticsStore, method: Method, layer: int) -> bool:
    return store.losses(method.name, layer).exists() and store.factors(method.name, layer).exists()


def _read(store: StatisticsStore, method: Method, layer: int, device: torch.device) -> LayerFit:
    losses = read_arrays(store.losses(method.name, layer))
    return LayerFit(losses, LayerFactors(TensorFile(store.factors(method.name, layer), device)))


def _keep(writer: Writer, store: StatisticsStore, method: Method, layer: int, fit: LayerFit) -> None:
    """The losses are written last: a layer with losses is whole."""
    losses = {name: torch.from_numpy(loss) for name, loss in fit.losses.items()}
    writer.write({store.factors(method.name, layer): fit.factors.tensors, store.losses(method.name, layer): losses})


def _device(model: nn.Module, sites: Sequence[Site]) -> torch.device:
    return read_parameter(model, f"{sites[0].weights[0].name}.weight").device


def _site_curves(site: Site, found: Mapping[str, Floats]) -> SiteCurves:
    names = [weight.name for weight in site.weights]
    low_rank = {name: LossCurve(found[f"low_rank/{name}"]) for name in names}
    shorter = {name: LossCurve(found[f"shorter/{name}"]) for name in names if f"shorter/{name}" in found}
    grouped = {name: LossCurve(found[f"grouped/{name}"]) for name in names if f"grouped/{name}" in found}
    return SiteCurves(site.name, low_rank, shorter, grouped)
