"""Candidates of weights that are split over two GPUs and share a GEMM, beside every combination by hand."""

from itertools import product

import numpy as np
import pytest

from gac.allocation.candidates import candidates
from gac.allocation.latencies import other_axes
from gac.allocation.split_latencies import SplitTiming
from gac.core.operations import Operation, all_gather, linear
from gac.core.workloads import Workload
from gac.forms import form_named
from gac.forms.tensor_parallel import split_operations
from gac.models.sites import Site, Weight
from gac.plan.costs import PARAMS, ns_of
from gac.plan.recipe import Space
from gac.profiling.table import Profile
from gac.runtime import contract
from gac.runtime.contract import apart_from
from tests.allocation.small_problems import any_times, curves_by
from tests.allocation.test_candidates import DECODE, PREFILL, curve

GPUS, READ = 2, 64
WEIGHTS = (
    Weight("q", 64, READ, input_group="in"),
    Weight("k", 16, READ, input_group="in"),
    Weight("v", 16, READ, input_group="in"),
)
SITE = Site("s", 0, "s", WEIGHTS, fused=(0, 1, 2))
WORKLOADS = (PREFILL, DECODE)
LOW_RANK, DENSE = form_named("low_rank"), form_named("dense")


def by_hand(table: Profile, forms: list[str], dims: list[int], workload: Workload) -> int:
    """Parts that run apart with their gathers, one GEMM and one gather of all others, and the second factors; or -1."""
    runs, width, numbers = list[Operation](), 0, 0
    for weight, form, dim in zip(WEIGHTS, map(form_named, forms), dims, strict=True):
        first, *behind = split_operations(form, weight, dim, workload.rows, GPUS)
        gather = behind[:1] if form is LOW_RANK else []
        runs += behind[len(gather) :]
        if first.axes["n"] >= apart_from(workload.rows):
            runs += [first, *gather]
        else:
            width += first.axes["n"]
            numbers += sum(item.axes["n"] for item in gather)
    runs += [linear(workload.rows, READ, width)] * (width > 0)
    runs += [all_gather(GPUS, workload.rows, numbers)] * (numbers > 0)
    result = [
        int(table.latency(item.operator, other_axes(item, "n"), "n", np.array([item.axes["n"]]))[0][0]) for item in runs
    ]
    return -1 if min(result) < 0 else sum(result)


@pytest.mark.parametrize("enough", [1 << 22, 10 << 10, pytest.param(4 << 10, marks=pytest.mark.slow)])
def test_no_combination_by_hand_is_better(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "_ENOUGH_OUTPUTS", enough)
    table = any_times(unknown=64)
    curves = curves_by(low_rank={item.name: curve(item.out_features, index) for index, item in enumerate(WEIGHTS)})
    columns = [PARAMS, *map(ns_of, WORKLOADS)]
    timing = SplitTiming(table, WORKLOADS, GPUS)
    result = candidates(SITE, curves, Space(("low_rank",), align=False), timing, columns)
    for forms, dims, latency in zip(result.forms.tolist(), result.dims.tolist(), result.latency.tolist(), strict=True):
        assert latency == [by_hand(table, forms, dims, item) for item in WORKLOADS]
    choices = []
    for item in WEIGHTS:
        ranks = [rank for rank in range(2, LOW_RANK.max_useful_dim(item) + 1) if rank % GPUS == 0]
        choices.append([("dense", DENSE.full(item)), *(("low_rank", rank) for rank in ranks)])
    for combination in product(*choices):
        forms, dims = [form for form, _ in combination], [dim for _, dim in combination]
        latency = [by_hand(table, forms, dims, item) for item in WORKLOADS]
        if min(latency) < 0:
            continue
        each = list(zip(WEIGHTS, forms, dims, strict=True))
        params = sum(form_named(form).params(item, dim) for item, form, dim in each)
        loss = sum(float(curves.of(LOW_RANK, item).loss[dim]) for item, form, dim in each if form != "dense")
        no_worse = (result.params <= params) & (result.loss <= loss + 1e-12) & (result.latency <= latency).all(1)
        assert no_worse.any(), combination
