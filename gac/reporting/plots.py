"""Cliffs as figures: some sweeps, or the cliffs of a GPU on one page. matplotlib is loaded when a figure is made."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gac.errors import ProfileError
from gac.profiling.cliffs import Cliffs, find_cliffs
from gac.profiling.table import Profile, Sweep
from gac.reporting.page import page, require_matplotlib
from gac.reporting.panel import plot_sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PANELS = 12

_ATLAS = (  # operators, dtypes, axes: the first of each that was measured
    (("linear",), ("bf16", "fp16"), ("k",)),
    (("linear",), ("bf16", "fp16"), ("n",)),
    (("linear",), ("bf16", "fp16"), ("m",)),
    (("low_rank",), ("bf16", "fp16"), ("r",)),
    (("sdpa",), ("bf16", "fp16"), ("d",)),
    (("sdpa_flash",), ("bf16", "fp16"), ("d",)),
    (("linear", "linear_rowwise"), ("fp8",), ("k", "n", "m")),
    (("int4_linear", "int4_linear_dequantised"), ("bf16",), ("n", "k", "m")),
)


def figure_of_sweeps(
    found: Sequence[tuple[Sweep, Cliffs]], title: str, dims: tuple[int, int] | None = None
) -> "Figure":
    """One panel a sweep, two in a row, each with its own legend.

    Raises:
        GacError: matplotlib is missing, or there are more than 12 sweeps.
    """
    require_matplotlib()
    if len(found) > MOST_PANELS:
        raise ProfileError(
            f"{len(found)} sweeps to plot", f"at most {MOST_PANELS}", "Choose fewer by operator, axis and shape."
        )
    with page(len(found), title) as (figure, panels):
        for ax, (sweep, cliffs) in zip(panels, found, strict=True):
            plot_sweep(ax, sweep, cliffs, dims)
    return figure


def atlas(profile: Profile) -> "Figure":
    """The cliffs of a GPU on one page: linear along k, n and m, low_rank along r, attention along d, FP8, INT4.

    Each panel is the longest of its kind among the profile's sweeps; kinds that were not measured are left out.

    Raises:
        GacError: matplotlib is missing, or the profile has no sweep of any kind.
    """
    longest = [_longest(profile, *kind) for kind in _ATLAS]
    found = [(sweep, find_cliffs(sweep)) for sweep in longest if sweep is not None]
    if not found:
        raise ProfileError(
            f"profile {profile.path.stem} has no sweep to draw",
            "at least 8 dims along k, n, m, r or d with all else fixed",
            "Measure them with gac profile.",
        )
    header = profile.header
    return figure_of_sweeps(found, f"{header.gpu}, PyTorch {header.torch}, CUDA {header.cuda}")


def _longest(profile: Profile, operators: Sequence[str], dtypes: Sequence[str], axes: Sequence[str]) -> Sweep | None:
    """The sweep with the most points, and of those the one with the most work, of the first kind that was measured."""
    for operator in operators:
        for axis in axes:
            kind = [one for one in profile.sweeps() if (one.operator, one.axis, one.cache) == (operator, axis, "cold")]
            kind = [one for one in kind if one.dtype in dtypes]
            if kind:
                return max(kind, key=lambda one: (len(one), int(np.prod([size for _, size in one.fixed]))))
    return None
