"""The model of a GPU: near what was left out of the table, and silent where the table cannot vouch for a number."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gac.profiling.operators import OPERATORS, operation
from gac.profiling.records import Measurement, Point
from gac.profiling.table import Profile
from tests.headers import make_profile

GEMMA = Path(__file__).parents[2] / "benchmarks/results/gemma3-270m-h200.jsonl"
TABLES = ["nvidia-h100-80gb-hbm3", "nvidia-h200"]


@cache
def shipped(name: str) -> Profile:
    return Profile.load(name)


def measured(
    shapes: Iterable[tuple[int, int, int]], operator: str = "linear", error: str | None = None
) -> list[Measurement]:
    """GEMMs that take 2 us and a ns for every 3,000 bytes; thrice as long where k is odd."""
    points = {Point(operation(operator, m=m, k=k, n=n)): (m, k, n) for m, k, n in shapes}
    if error:
        return [Measurement.failed(point, error) for point in points]
    latencies = ((2000 + 2 * (m * k + k * n + m * n) / 3000) * (3 if k % 2 else 1) for m, k, n in points.values())
    return [Measurement.of(point, ns, 0.0, 10, 1980, True) for point, ns in zip(points, latencies, strict=True)]


GRID = [(1, k, n) for k in range(512, 4097, 512) for n in range(512, 4097, 512)]


def modelled(profile: Profile, *dims: int, m: int = 1, k: int = 1024) -> list[int]:
    return profile.modelled("linear", {"m": m, "k": k}, "n", np.array(dims)).tolist()


def test_a_shape_that_was_not_measured_takes_about_what_its_neighbours_say() -> None:
    (expected,) = (row.median_ns for row in measured([(1, 1280, 2304)]))
    assert modelled(make_profile(measured(GRID)), 2304, k=1280)[0] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"m": 2}, "no such number of rows"),
        ({"k": 1281}, "no odd k"),
        ({"k": 127}, "a factor of 4 below the smallest"),
        ({"k": 65_536}, "a factor of 4 above the largest"),
    ],
)
def test_what_the_table_cannot_vouch_for_is_unknown(shape: dict[str, int], why: str) -> None:
    assert modelled(make_profile(measured(GRID)), 2304, **shape) == [-1], why


def test_a_shape_that_failed_or_is_refused_has_no_latency() -> None:
    profile = make_profile([*measured(GRID), *measured([(1, 1024, 2304)], error="out of memory")])
    assert [ns > 0 for ns in modelled(profile, 2304, 2432)] == [False, True]
    profile = make_profile(replace(row, dtype="fp8") for row in measured(GRID))
    known = profile.modelled("linear", {"m": 1, "k": 1024}, "n", np.array([2304, 2312]), "fp8")
    assert (known > 0).tolist() == [True, False]  # torch._scaled_mm takes multiples of 16 only


@pytest.mark.parametrize(("name", "rows"), zip(TABLES, (1, 1024), strict=True))
def test_a_table_states_a_small_error_on_shapes_left_out(name: str, rows: int) -> None:
    error = shipped(name).model.error(rows)
    assert error is not None
    assert error < 0.06


def test_a_pair_takes_about_what_it_took_where_it_was_measured() -> None:
    profile = shipped(TABLES[1])
    sweep = profile.rows_of("low_rank", {"m": 1024, "k": 4096, "n": 4096}, "r")
    ns = profile.modelled("low_rank", {"m": 1024, "k": 4096, "n": 4096}, "r", sweep.dims)
    assert np.median(np.abs(ns / sweep.ns - 1)) < 0.03
    by_rank = {dim: int(row) for dim, row in zip(sweep.dims.tolist(), ns, strict=True)}
    assert by_rank[1023] > 3 * by_rank[1024]  # the cliff stays


def test_shapes_of_gemma_that_an_h200_measured_are_met_by_the_model_of_the_shipped_table() -> None:
    gemma, profile = Profile.load(GEMMA), shipped("nvidia-h200")
    sweep = gemma.rows_of("low_rank", {"m": 1024, "k": 640, "n": 2048}, "r")
    off = np.abs(profile.modelled("low_rank", dict(sweep.fixed), "r", sweep.dims) / sweep.ns - 1)
    assert np.median(off) < 0.06
    assert np.quantile(off, 0.95) < 0.2


def test_a_scheme_is_modelled_by_the_bytes_that_its_weights_take() -> None:
    """2 us, and a ns for every 3,000 bytes of a GEMM in w4a16."""
    operator = OPERATORS.get("linear")

    def took(shape: Mapping[str, int]) -> float:
        return 2000 + operator.bytes(shape, "w4a16") / 3000

    rows = [replace(row, dtype="w4a16", median_ns=took(row.shape)) for row in measured(GRID)]
    profile, shape = make_profile(rows), {"m": 1, "k": 1280, "n": 2304}
    (modelled_ns,) = profile.modelled("linear", {"m": 1, "k": 1280}, "n", np.array([2304]), "w4a16")
    assert modelled_ns == pytest.approx(took(shape), rel=0.01)
    assert profile.modelled("linear", {"m": 1, "k": 1280}, "n", np.array([2304]), "w4a16:64").tolist() == [-1]
    assert profile.modelled("linear", {"m": 1, "k": 1280}, "n", np.array([2304])).tolist() == [-1]


def test_what_no_kernel_reads_is_modelled_by_itself() -> None:
    """Columns that are no multiple of 32 are unpacked in PyTorch, which takes ten times as long here."""
    shapes = [(1, k, n) for k in range(512, 2049, 32) for n in (512, 1024, 2048)]
    fast = measured(shapes)
    slow = [
        replace(row, shape=row.shape | {"k": row.shape["k"] + 16}, median_ns=10 * (row.median_ns or 0)) for row in fast
    ]
    profile = make_profile([replace(row, dtype="w4a16") for row in (*fast, *slow)])
    expected = {row.shape["k"]: row.median_ns for row in (*fast, *slow) if row.shape["n"] == 1024}
    for k in (1024, 1040):
        (modelled_ns,) = profile.modelled("linear", {"m": 1, "k": k}, "n", np.array([1536]), dtype="w4a16").tolist()
        low, high = (expected[k] or 0), 2 * (expected[k] or 0)
        assert low < modelled_ns < high
