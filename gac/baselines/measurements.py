"""What some peers' rules ask of the model besides loss curves: measured by layer, kept beside the statistics."""

from collections.abc import Callable, Iterator, Sequence

import torch

from gac.core.arrays import Floats
from gac.measurement.calibration import CalibrationRun
from gac.measurement.store import read_arrays, write_tensors
from gac.models.loading import check_in_memory
from gac.models.sites import Site

Stream = Callable[[CalibrationRun, Sequence[Site]], Iterator[tuple[int, dict[str, Floats]]]]


def measure_layers(rule: str, stream: Stream, run: CalibrationRun, sites: Sequence[Site]) -> dict[str, Floats]:
    """What a rule asks for, by weight name.

    Args:
        rule: under whose name it is kept.
        stream: measures it, layer by layer.
        sites: whole layers of them, in model order.

    Raises:
        ModelError: a loss or a statistic is not finite, or a weight is offloaded.
        StatisticsError: what is kept cannot be written or read.
    """
    use = "where its gradient or its truncation can be measured"
    check_in_memory(run.model, f", under the rule {rule}", use, ", or take another rule")
    layers = dict.fromkeys(site.layer for site in sites)
    paths = {layer: run.store.measured(f"{rule}-{run.method.name}", layer) for layer in layers} if run.store else {}
    found = {layer: read_arrays(path) for layer, path in paths.items() if path.exists()}
    missing = [site for site in sites if site.layer not in found]
    for layer, measured in stream(run, missing):
        found[layer] = measured
        if paths:
            write_tensors(paths[layer], {name: torch.from_numpy(values) for name, values in measured.items()})
    return {name: values for layer in layers for name, values in found[layer].items()}
