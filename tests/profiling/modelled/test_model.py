"""The model of a GPU: near what was left out of the table, and silent where the table cannot vouch for a number."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from gac.allocation.latencies import UNKNOWN, Timing
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS, form_named
from gac.models.families import family_of
from gac.models.shapes import Shapes
from gac.profiling.modelled.kriging import MOST, Kriging, drawn
from gac.profiling.modelled.roofline import Gpu, fitted, gemm_terms, row_terms
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.records import Measurement, Point
from gac.profiling.table import Profile
from tests.headers import make_profile

GEMMA = Path(__file__).parents[2] / "benchmarks/results/gemma3-270m-h200.jsonl"
TABLES = ["nvidia-h100-80gb-hbm3", "nvidia-h200"]


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


def modelled(profile: Profile, *dims: int, m: int = 1, k: int = 1024, dtype: str = "bf16") -> list[int]:
    return profile.modelled("linear", {"m": m, "k": k}, "n", np.array(dims), dtype).tolist()


def test_a_shape_that_was_not_measured_takes_about_what_its_neighbours_say() -> None:
    (expected,) = (row.median_ns for row in measured([(1, 1280, 2304)]))
    assert modelled(make_profile(measured(GRID)), 2304, k=1280)[0] == pytest.approx(expected, rel=0.05)


def test_what_the_table_cannot_vouch_for_is_unknown() -> None:
    """It has no such number of rows, no odd k, none a factor of 4 below its smallest or above its largest."""
    profile = make_profile(measured(GRID))
    for shape in ({"m": 2}, {"k": 1281}, {"k": 127}, {"k": 65_536}):
        assert modelled(profile, 2304, **shape) == [-1], shape


def test_a_shape_that_failed_or_is_refused_has_no_latency() -> None:
    profile = make_profile([*measured(GRID), *measured([(1, 1024, 2304)], error="out of memory")])
    assert [ns > 0 for ns in modelled(profile, 2304, 2432)] == [False, True]
    profile = make_profile(replace(row, dtype="fp8") for row in measured(GRID))
    known = modelled(profile, 2304, 2312, dtype="fp8")
    assert [ns > 0 for ns in known] == [True, False]  # torch._scaled_mm takes multiples of 16 only


@pytest.mark.parametrize(("name", "rows"), zip(TABLES, (1, 1024), strict=True))
def test_a_table_states_a_small_error_on_shapes_left_out(name: str, rows: int) -> None:
    error = Profile.load(name).model.error(rows)
    assert error is not None
    assert error < 0.06


def test_a_pair_takes_about_what_it_took_where_it_was_measured() -> None:
    profile = Profile.load(TABLES[1])
    sweep = profile.rows_of("low_rank", {"m": 1024, "k": 4096, "n": 4096}, "r")
    ns = profile.modelled("low_rank", {"m": 1024, "k": 4096, "n": 4096}, "r", sweep.dims)
    assert np.median(np.abs(ns / sweep.ns - 1)) < 0.03
    by_rank = {dim: int(row) for dim, row in zip(sweep.dims.tolist(), ns, strict=True)}
    assert by_rank[1023] > 3 * by_rank[1024]  # the cliff stays


def test_shapes_of_gemma_that_an_h200_measured_are_met_by_the_model_of_the_shipped_table() -> None:
    gemma, profile = Profile.load(GEMMA), Profile.load("nvidia-h200")
    sweep = gemma.rows_of("low_rank", {"m": 1024, "k": 640, "n": 2048}, "r")
    off = np.abs(profile.modelled("low_rank", dict(sweep.fixed), "r", sweep.dims) / sweep.ns - 1)
    assert np.median(off) < 0.06
    assert np.quantile(off, 0.95) < 0.2


def test_a_scheme_is_modelled_by_the_bytes_that_its_weights_take() -> None:
    """2 us, and a ns for every 3,000 bytes of a GEMM in w4a16."""

    def took(shape: Mapping[str, int]) -> float:
        return 2000 + OPERATORS.get("linear").bytes(shape, "w4a16") / 3000

    profile = make_profile(replace(row, dtype="w4a16", median_ns=took(row.shape)) for row in measured(GRID))
    expected = pytest.approx(took({"m": 1, "k": 1280, "n": 2304}), rel=0.01)
    assert modelled(profile, 2304, k=1280, dtype="w4a16") == [expected]
    assert [modelled(profile, 2304, k=1280, dtype=dtype) for dtype in ("w4a16:64", "bf16")] == [[-1], [-1]]


def test_what_no_kernel_reads_is_modelled_by_itself() -> None:
    """Columns that are no multiple of 32 are unpacked in PyTorch, which takes ten times as long here."""
    shapes = [(1, k, n) for k in range(512, 2049, 32) for n in (512, 1024, 2048)]
    fast = measured(shapes)
    slow = [replace(row, shape=row.shape | {"k": row.shape["k"] + 16}, median_ns=10 * row.median_ns) for row in fast]
    profile = make_profile(replace(row, dtype="w4a16") for row in (*fast, *slow))
    expected = {row.shape["k"]: row.median_ns for row in (*fast, *slow) if row.shape["n"] == 1024}
    for k in (1024, 1040):
        assert expected[k] < modelled(profile, 1536, k=k, dtype="w4a16")[0] < 2 * expected[k]


WIDTHS = np.arange(256, 4097, 128)


def shapes_at(*depths: int) -> np.ndarray:
    return np.array(list(product(depths, WIDTHS)))


def stairs(widths: np.ndarray) -> np.ndarray:
    return 0.2 * (widths // 1024 % 2)


def test_a_fit_gives_back_stairs_and_finds_them_at_sizes_of_the_other_axis_that_were_not_measured() -> None:
    shapes = shapes_at(1024, 4096)
    field = Kriging.fit(shapes, stairs(shapes[:, 1]))
    assert field.predict(shapes) == pytest.approx(stairs(shapes[:, 1]), abs=0.02)
    assert np.corrcoef(field.predict(shapes_at(2048)), stairs(WIDTHS))[0, 1] > 0.95


def test_what_is_missed_without_a_block_is_what_a_fit_without_it_misses() -> None:
    shapes = shapes_at(1024, 2048)
    residuals = np.random.default_rng(1).normal(size=len(shapes))
    blocks = np.arange(len(shapes)) % 3
    missed = Kriging.fit(shapes, residuals).left_out(blocks)
    for block in range(3):
        out = blocks == block
        without = Kriging.fit(shapes[~out], residuals[~out])
        assert missed[out] == pytest.approx(residuals[out] - without.predict(shapes[out]), abs=1e-8)


def test_of_many_shapes_the_same_ones_are_drawn_each_time() -> None:
    assert drawn(5).tolist() == [0, 1, 2, 3, 4]
    assert len(drawn(3 * MOST)) == MOST
    assert (drawn(3 * MOST) == drawn(3 * MOST)).all()


GPU = Gpu(sm_count=132, l2_bytes=50_000_000)


@pytest.mark.parametrize("rows", [1, 64, 65, 1024, "low-bit"])
@pytest.mark.parametrize("axis", ["k", "n"])
def test_no_term_falls_where_a_gemm_gets_longer(rows: int | str, axis: str) -> None:
    terms_of = row_terms if rows == "low-bit" else partial(gemm_terms, rows)
    long, same = np.arange(8, 8192, 8), np.full(1023, 4096)
    terms = terms_of(*((long, same) if axis == "k" else (same, long)), GPU, 2.0 * long * same)
    assert terms.min() >= 0
    assert (np.diff(terms, axis=0) >= -1e-12).all()


def test_steps_of_one_row_are_whole_behind_the_first_and_waves_always() -> None:
    """32 outputs of each of 132 SMs are 4224."""
    depths, widths = np.array([1024, 2048, 2304, 4096, 2304]), np.array([64, 64, 64, 4224, 4232])
    terms = row_terms(depths, widths, GPU, 0.5 * depths * widths)
    assert terms[:, 3].tolist() == [0.5, 1, 2, 2, 4]


def test_the_fit_finds_the_coefficients_of_what_it_is_a_sum_of() -> None:
    widths = np.arange(64, 8192, 64)
    depths = np.resize([512, 1024, 4096], len(widths))
    terms = gemm_terms(1024, depths, widths, GPU, 2.0 * depths * widths)
    ns = terms @ np.linspace(100, 1000, terms.shape[1])
    assert terms @ fitted(terms, ns) == pytest.approx(ns, rel=1e-6)


MODELS = {
    "gemma-3-270m": Shapes("gemma3_text", 640, 2048, 18, 4, 1, 256, 262_144),
    "qwen3-0.6b": Shapes("qwen3", 1024, 3072, 28, 16, 8, 128, 151_936),
    "llama-3.2-1b": Shapes("llama", 2048, 8192, 16, 32, 8, 64, 128_256),
}
WORKLOADS = [Workload.parse(name) for name in ("prefill:1x1024", "decode:1@1024")]


@pytest.mark.parametrize(("name", "table"), zip(MODELS, ("nvidia-h200", "nvidia-h100-80gb-hbm3") * 2, strict=False))
def test_no_latency_of_the_model_is_unknown(name: str, table: str) -> None:
    timing, shapes = Timing(Profile.load(table), WORKLOADS), MODELS[name]
    weights = [weight for site in family_of(shapes).sites(shapes) for weight in site.weights]
    distinct = {(weight.out_features, weight.in_features): weight for weight in weights}
    for weight, form in product(distinct.values(), map(form_named, ("dense", *DEFAULT_FORMS))):
        if form.applies_to(weight):
            full = form.full(weight)
            dims = np.arange(64, full + 1, 64) if form.latency.axis(weight) else np.array([full])
            ns, _ = timing.of_weight(form, weight, dims)
            assert (ns != UNKNOWN).all(), f"{form.name} of {weight.name}"
