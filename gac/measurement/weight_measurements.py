"""Measurements of single weights that a rule needs besides loss curves, by name; stored beside the statistics."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from gac.core.arrays import Floats
from gac.core.registry import Registry, check_contract
from gac.measurement.calibration import CalibrationRun
from gac.measurement.store import read_arrays, write_tensors
from gac.models.plain import check_in_memory
from gac.models.sites import Site


class WeightMeasurement(ABC):
    """A measurement of every weight; a rule asks for it by name in ``Rule.needs``.

    Attributes:
        name: results are stored under it: a measurement that works differently needs another name.
    """

    name: str

    @abstractmethod
    def stream(self, run: CalibrationRun, sites: Sequence[Site]) -> Iterator[tuple[int, dict[str, Floats]]]:
        """Yield ``(layer, {weight name: values})`` for whole layers of sites, in any order."""


MEASUREMENTS: Registry[WeightMeasurement] = Registry(
    "measurement",
    {
        "zero-sum": "gac_extensions.baselines.measurements:LossChanges",
        "sensitivity": "gac_extensions.baselines.measurements:TruncationLosses",
    },
    lambda measurement: check_contract("measurement", measurement, (), WeightMeasurement),
)


def measure_weights(name: str, run: CalibrationRun, sites: Sequence[Site]) -> dict[str, Floats]:
    """Measure all weights of whole layers, or read what is stored of them; values by weight name."""
    use = "where its gradient or its truncation can be measured"
    check_in_memory(run.model, f", under the rule {name}", use, ", or take another rule")
    layers = dict.fromkeys(site.layer for site in sites)
    paths = {layer: run.store.path(f"{name}-{run.method.name}", layer) for layer in layers}
    values = {layer: read_arrays(path) for layer, path in paths.items() if path.exists()}
    missing = [site for site in sites if site.layer not in values]
    for layer, measured in MEASUREMENTS.get(name).stream(run, missing):
        values[layer] = measured
        write_tensors(paths[layer], {weight: torch.from_numpy(array) for weight, array in measured.items()})
    return {weight: array for layer in layers for weight, array in values[layer].items()}
