"""How far modelled latencies are off where one model's shapes are left out, of tables that are made up."""

from collections.abc import Sequence

import pytest

from gac.profiling.operators import OPERATORS
from gac.profiling.records import Measurement, Point
from gac.profiling.sweeps.coverage import WORKLOADS, model_points
from gac.profiling.table import Profile
from tests.benchmarks.modelled import model_left_out, schemes_of
from tests.headers import make_profile

DECODE = [one for one in WORKLOADS if one.rows == 1]
MODELS = ("qwen3-8b", "gemma-3-4b")


def by_bytes(point: Point) -> float:
    return 1000 + OPERATORS.get(point.operation.operator).bytes(point.operation.axes, point.dtype) / 1000


def table(models: Sequence[str], schemes: Sequence[str]) -> Profile:
    """Dense GEMMs and narrower ones of one row, by the bytes that they move."""
    points = [one for model in models for one in model_points(model, DECODE, forms=["narrow"], schemes=schemes)]
    return make_profile(Measurement.of(one, by_bytes(one), 0.0, 10, 1980, True) for one in dict.fromkeys(points))


@pytest.fixture(scope="module")
def two() -> Profile:
    return table(MODELS, ["w4a16", "fp8"])


def test_a_model_is_left_out_in_every_scheme_that_the_table_has(two: Profile) -> None:
    assert schemes_of(two.measurements) == ("w4a16", "fp8")
    rows = model_left_out(two, "gemma-3-4b")
    by_dtype = {one["dtype"]: one for one in rows if one["operator"] == "all"}
    assert list(by_dtype) == ["bf16", "fp8_dynamic", "w4a16"]
    ours = set(model_points("gemma-3-4b", DECODE, forms=["narrow"], schemes=["w4a16", "fp8"]))
    for dtype, one in by_dtype.items():
        assert one["shapes"] >= len([point for point in ours if point.dtype == dtype])  # some are another form's too
        assert one["unknown"] < one["shapes"]
        assert one["median"] <= one["p95"] < 0.1


def test_a_table_of_16_bits_is_judged_as_before() -> None:
    rows = model_left_out(table(MODELS, []), "gemma-3-4b")
    assert [(one["operator"], one["dtype"], one["rows"]) for one in rows] == [
        ("linear", "bf16", "1"),
        ("linear", "bf16", "all"),
    ]


def test_what_nothing_is_left_of_is_unknown() -> None:
    rows = model_left_out(table(["gemma-3-4b"], ["w4a16"]), "gemma-3-4b")
    assert {(one["shapes"] - one["unknown"], one["median"], one["p95"]) for one in rows} == {(0, None, None)}
    assert model_left_out(table(["qwen3-8b"], []), "smollm2") == []
