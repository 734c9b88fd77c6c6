"""Form, dim and scheme together under one, two and three limits: the optimum of brute force and of HiGHS."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import fsum

import numpy as np
import pytest
from numpy.typing import NDArray

from gac.allocation.problem import Problem, as_knapsack
from gac.core.arrays import Ints
from gac.core.operations import Operation
from gac.forms import form_named
from gac.plan.costs import BYTES, COSTS, PARAMS, floored, ns_of
from gac.profiling.table import Profile
from gac.schemes import scheme_named
from tests.allocation.small_problems import PREFILL, SIDE
from tests.reporting.report_plans import rounding

LIMITS = [(BYTES,), (BYTES, ns_of(PREFILL)), (BYTES, ns_of(PREFILL), PARAMS)]


class Faster(Profile):
    """A table of 16-bit numbers in which GEMMs of fewer bits take 7 ns less."""

    def latency(
        self, operator: str, fixed: Mapping[str, int], axis: str, dims: Ints, dtype: str = "bf16"
    ) -> tuple[Ints, NDArray[np.bool_]]:
        ns, known = super().latency(operator, fixed, axis, dims)
        return ns - 7 * (dtype != "bf16"), known

    def point(self, operation: Operation, dtype: str = "bf16") -> int | None:
        ns = super().point(operation)
        return None if ns is None else ns - 7 * (dtype != "bf16")


def timed() -> Problem:
    """Two sites whose numbers have 16 or 4 bits, with latencies of both."""
    of = rounding(budget=1.0)
    table = of.profile
    faster = Faster(table.path, table.header, table.measurements, table.digest, table.sentinels)
    return replace(of, profile=faster)


@pytest.mark.parametrize("columns", LIMITS)
@pytest.mark.parametrize("share", [0.3, 0.4, 0.5, 0.75])
def test_no_form_dim_and_scheme_is_better(columns: Sequence[str], share: float) -> None:
    """Against every choice that there is, counted by hand, before any candidate is left out."""
    of = timed()
    limits = {column: floored(share, of.dense.amount(column)) for column in columns}
    solution = as_knapsack(of.candidates(limits), limits).solve()
    options = [[_counted(of, site.weights[0], *each) for each in CHOICES] for site in of.sites]
    within = [
        fsum(loss for loss, _ in chosen)
        for chosen in product(*options)
        if all(sum(costs[column] for _, costs in chosen) <= most for column, most in limits.items())
    ]
    assert solution.certificate.status == "optimal"
    assert solution.certificate.value == pytest.approx(min(within), rel=1e-12)


CHOICES = [
    (form, scheme, dim)
    for scheme in ("bf16", "w4a16")
    for form, dims in (("low_rank", range(1, 6)), ("dense", [SIDE]))
    for dim in dims
]


def _counted(of: Problem, weight, name: str, scheme: str, dim: int):  # type: ignore[no-untyped-def]
    """Loss and costs of one weight."""
    form, stored = form_named(name), scheme_named(scheme)
    curve = of.curves.of(form, weight, scheme)
    ns = (10 * dim if name == "low_rank" else 60) - (7 if scheme == "w4a16" else 0)
    costs = {column: cost.of_choice(form, stored, weight, dim) for column, cost in COSTS.items()}
    return 0.0 if curve is None else float(curve.loss[dim]), costs | {ns_of(PREFILL): ns}
