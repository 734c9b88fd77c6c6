"""Calibration runs of small models."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gac.forms.curvature.registry import METHODS
from gac.measurement.calibration import CalibrationRun
from gac.measurement.store import StatisticsStore, temporary_store
from gac.models.families import family_of
from gac.models.sites import Site

WINDOWS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))


def run_of(
    model: Any, folder: Path | None = None, method: str = "kfac", windows: Tensor = WINDOWS, **options: Any
) -> CalibrationRun:
    store = StatisticsStore(folder) if folder else temporary_store()
    return CalibrationRun(model, windows, METHODS.get(method), store, progress=False, **options)


def sites_of(model: Any) -> tuple[Site, ...]:
    return tuple(family_of(model.config).sites(model.config))
