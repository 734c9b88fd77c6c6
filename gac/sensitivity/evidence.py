"""What some peers' rules ask of the model besides loss curves: measured by layer, kept beside the statistics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from gac.files import atomic_path
from gac.sensitivity.calibration import StatisticsStore
from gac.sensitivity.first_order import stream_changes
from gac.sensitivity.methods import Method
from gac.sensitivity.probes import stream_probes
from gac.sites import Floats, Site

Stream = Callable[
    [nn.Module, Sequence[Site], Tensor, Method, StatisticsStore | None, bool], Iterator[tuple[int, dict[str, Floats]]]
]

STREAMS: Mapping[str, Stream] = MappingProxyType({"zero-sum": stream_changes, "sensitivity": stream_probes})


def measure_evidence(
    rule: str,
    model: nn.Module,
    sites: Sequence[Site],
    windows: Tensor,
    method: Method,
    store: StatisticsStore | None,
    *,
    progress: bool = True,
) -> dict[str, Floats]:
    """What the rule of this name asks for, by weight name; nothing for a rule that reads loss curves alone.

    Args:
        sites: in model order.
        windows: calibration token ids, int64, shape ``(windows, tokens)``.
        store: where layers are found again; None keeps nothing.

    Raises:
        ModelError: a loss or a statistic is not finite.
    """
    if rule not in STREAMS:
        return {}
    layers = dict.fromkeys(site.layer for site in sites)
    paths = {layer: _path(store, rule, method, layer) for layer in layers}
    found = {layer: load_file(path) for layer, path in paths.items() if path and path.exists()}
    missing = [site for site in sites if site.layer not in found]
    for layer, measured in STREAMS[rule](model, missing, windows, method, store, progress):
        found[layer] = measured
        if path := paths[layer]:
            with atomic_path(path) as temporary:
                save_file(measured, temporary)
    return {name: values for layer in layers for name, values in found[layer].items()}


def _path(store: StatisticsStore | None, rule: str, method: Method, layer: int) -> Path | None:
    return store.directory / f"{rule}-{method.name}-{layer:04d}.safetensors" if store else None
