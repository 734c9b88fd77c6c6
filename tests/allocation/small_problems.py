"""Problems small enough to try every choice: square weights of 12, ranks 1 to 5 or dense."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np

from gac.allocation.problem import Problem
from gac.core.arrays import Ints
from gac.core.operations import Operation
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
QKV = tuple(
    Site(name, 0, f"{name}_proj", (Weight(name, n, 16, input_group="a"),))
    for name, n in {"q": 12, "k": 8, "v": 8}.items()
)
GATED = Site(
    "mlp",
    0,
    "mlp",
    (Weight("gate", 24, 8, "out", "mlp"), Weight("up", 24, 8, "out", "mlp"), Weight("down", 8, 24, "in")),
)
"""Weights that share their first GEMM, small enough to try every rank."""


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


class AnyTimes(Profile):
    """Times of every shape in every dtype, which grow with the sizes, and by chance; one in ``unknown`` is unknown."""

    unknown = 0

    def latency(self, operator: str, fixed: Any, axis: str, dims: Ints, dtype: str = "bf16") -> tuple[Ints, Any]:
        sizes = {**fixed, axis: dims}
        key = crc32(f"{operator}{dtype}".encode()) + sum(crc32(name.encode()) % 9973 * sizes[name] for name in sizes)
        chance = (key % 9973) ** 2 % 9973
        ns = 1 + chance % 60 + sum(sizes[name] for name in sizes if name not in ("m", "gpus"))
        known = chance % self.unknown != 0 if self.unknown else np.full(len(dims), True)
        return np.where(known, ns, -1), np.ones(len(dims), dtype=np.bool_)

    def point(self, operation: Operation, dtype: str = "bf16") -> int | None:
        *fixed, (axis, size) = operation.shape
        ns = int(self.latency(operation.operator, dict(fixed), axis, np.array([size]), dtype)[0][0])
        return None if ns < 0 else ns


def any_times(unknown: int = 0) -> Profile:
    table = profile([])
    result = AnyTimes(table.path, table.header, table.measurements, table.digest, table.sentinels)
    object.__setattr__(result, "unknown", unknown)
    return result
