"""Loss curves of every site of a model, layer by layer, kept on disk beside the statistics."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from gac.files import atomic_path
from gac.forms import Grouped, Weight, form_named
from gac.models.linears import as_linear
from gac.sensitivity.calibration import LayerMoments, StatisticsStore, stream_moments
from gac.sensitivity.fold import Measured, shortened
from gac.sensitivity.groups import decompose_groups
from gac.sensitivity.methods import Method, decompose
from gac.sensitivity.narrow import eliminate
from gac.sites import Floats, LossCurve, Site, SiteCurves


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
    progress: bool = True,
) -> ModelCurves:
    """Calibrate, decompose every weight, order neurons and value dims; layers that are in the store are read.

    Args:
        windows: calibration token ids, int64, shape ``(windows, tokens)``.

    Raises:
        ModelError: a statistic is not finite.
    """
    groups = [(layer, list(group)) for layer, group in groupby(sites, key=lambda site: site.layer)]
    found = {layer: load_file(path) for layer, _ in groups if (path := _path(store, method, layer)) and path.exists()}
    missing = [site for layer, group in groups if layer not in found for site in group]
    by_layer = dict(groups)
    stream = stream_moments(model, missing, windows, power=method.power, store=store, progress=progress)
    bar = tqdm(stream, "decomposing", len(by_layer) - len(found), unit="layer", disable=not progress or not missing)
    for layer, moments in bar:
        found[layer] = _layer_curves(model, by_layer[layer], moments, method)
        if path := _path(store, method, layer):
            with atomic_path(path) as temporary:
                save_file(found[layer], temporary)
    curves = tuple(_site_curves(site, found[site.layer]) for site in sites)
    return ModelCurves(curves, float(found[groups[0][0]]["loss"]))


def _path(store: StatisticsStore | None, method: Method, layer: int) -> Path | None:
    return store.directory / f"losses-{method.name}-{layer:04d}.safetensors" if store else None


def _layer_curves(model: nn.Module, sites: Sequence[Site], moments: LayerMoments, method: Method) -> dict[str, Floats]:
    """The curves of one layer, by ``low_rank/<weight>``, ``grouped/<weight>`` and ``shorter/<weight>``.

    The last stands for the weights that a form shortens together, and names the one that is shorter on its input.
    """
    curves: dict[str, Floats] = {"loss": np.array(moments.loss)}
    weights = [weight for site in sites for weight in site.weights]
    grouped = [form for form in map(form_named, method.forms) if isinstance(form, Grouped)]
    for weight in weights:
        tensor = _weight(model, weight)
        metric = method.metric(moments.of(weight))
        curves[f"low_rank/{weight.name}"] = decompose(tensor, metric).curve.loss
        folded = method.folds and weight.values == "out"
        for form in (form for form in grouped if form.takes(weight) and not folded):
            curves[f"grouped/{weight.name}"] = decompose_groups(tensor, metric, form.groups(weight)).curve.loss
        if weight.neurons == "in":
            curves[f"shorter/{weight.name}"] = eliminate(tensor, metric).curve.loss
        if weight.values == "in":
            values = next(other for other in weights if other.values == "out")
            written = Measured(_weight(model, values), method.metric(moments.of(values)))
            of_values = shortened(method, written, Measured(tensor, metric), weight.heads, values.heads)
            curves[f"shorter/{weight.name}"] = of_values.curve.loss
    return curves


def _weight(model: nn.Module, weight: Weight) -> Tensor:
    tensor = as_linear(model.get_submodule(weight.name)).weight
    assert isinstance(tensor, Tensor)
    return tensor


def _site_curves(site: Site, found: dict[str, Floats]) -> SiteCurves:
    names = [weight.name for weight in site.weights]
    low_rank = {name: LossCurve(found[f"low_rank/{name}"]) for name in names}
    shorter = {name: LossCurve(found[f"shorter/{name}"]) for name in names if f"shorter/{name}" in found}
    grouped = {name: LossCurve(found[f"grouped/{name}"]) for name in names if f"grouped/{name}" in found}
    return SiteCurves(site.name, low_rank, shorter, grouped)
