"""Problems small enough to try every choice: square weights of 12, ranks 1 to 5 or dense."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gac.allocation.problem import Problem
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.models.sites import Site, Weight
from gac.plan.plan import Calibration, Measured, ProfileUsed
from gac.plan.recipe import Recipe
from gac.profiling.records import Measurement
from gac.profiling.table import Profile
from tests.changed import changed_recipe
from tests.headers import make_profile

PREFILL, DECODE = "prefill:1x8", "decode:1@8"
SIDE, RANKS = 12, 5
MEASURED = Measured(
    model="tiny",
    digest="0" * 64,
    params=10_000,
    family="llama",
    calibration=Calibration("wiki-sample", 64, 1024, "1" * 64, 2.0),
    profile=ProfileUsed("NVIDIA Test GPU", "2" * 64, "asked for; no GPU here to compare with"),
    factor=0.6,
)


def curves_by(**forms: Mapping[str, LossCurve]) -> LossCurves:
    """Curves by form, and then by weight name."""
    return LossCurves({(form, "bf16", name): curve for form, of in forms.items() for name, curve in of.items()})


def problem(
    losses: Sequence[Sequence[float]], latencies: Sequence[int], workloads: Sequence[str] = (PREFILL, DECODE)
) -> Problem:
    """One site a row of losses.

    Args:
        losses: what ranks 1 to 5 lose, never rising; dense loses nothing.
        latencies: ns of ranks 1 to 5 and of dense under ``prefill:1x8``; under ``decode:1@8`` the same in reverse.
            Other workloads are unknown.
    """
    sites = tuple(
        Site(f"site{index}", index, "q_proj", (Weight(f"site{index}", SIDE, SIDE),)) for index in range(len(losses))
    )
    ranks = [LossCurve(np.array([row[0], *row, *[0.0] * (SIDE - RANKS)])) for row in losses]
    curves = curves_by(low_rank={site.name: curve for site, curve in zip(sites, ranks, strict=True)})
    table = profile([*rows(8, latencies), *rows(1, latencies[::-1])])
    recipe = Recipe.of(forms=["low_rank"], workloads=workloads, align=False, refit="none")
    return Problem(sites, curves, table, recipe, MEASURED)


def asking(of: Problem, budget: float, **options: Any) -> Problem:
    """The problem with a budget, and whatever else is asked for."""
    return replace(of, recipe=changed_recipe(of.recipe, budget=budget, **options))


def rows(m: int, latencies: Sequence[int]) -> list[Measurement]:
    pairs = [measured("low_rank", ns, m=m, k=SIDE, r=index + 1, n=SIDE) for index, ns in enumerate(latencies[:-1])]
    return [*pairs, measured("linear", latencies[-1], m=m, k=SIDE, n=SIDE)]


def measured(operator: str, ns: float, **shape: int) -> Measurement:
    return Measurement(operator, shape, "bf16", "cold", float(ns), 0.0, 10, 1980, True)


def profile(rows: Sequence[Measurement]) -> Profile:
    return make_profile(rows)
