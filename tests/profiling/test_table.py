"""Tables of latencies: how they are read, what they interpolate, and the model of a GPU that they vouch for."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gac.allocation.latencies import UNKNOWN, Timing
from gac.core.errors import ProfileError
from gac.core.operations import linear
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS, form_named
from gac.forms.low_rank import low_rank
from gac.models.families import family_of
from gac.models.shapes import SHAPES, Shapes
from gac.profiling import folders
from gac.profiling.modelled.kriging import MOST, Kriging, drawn
from gac.profiling.modelled.roofline import Gpu, fitted, gemm_terms, row_terms
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.records import Launch, Measurement, Point
from gac.profiling.sweeps.coverage import model_points
from gac.profiling.table import Profile, interpolate
from tests.headers import make_profile
from tests.profiling.examples import make_sweep
from tests.refused import assert_refused

SHAPE = {"m": 1, "k": 64, "n": 64}
FIXED = {"m": 1024, "k": 4096, "n": 4096}


def dims(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_profile_is_read_with_its_header_rows_kernels_and_digest(profile_file, header) -> None:
    profile_file.kernel("nvjet_a", 384, 200_000).kernel("cutlass_b", 128, 0)
    profile_file.row("linear", SHAPE, 1500.5, launches=[[1, 4, 1, 1], [0, 132, 1, 1], [1, 2, 3, 4]])
    path = profile_file.write()
    profile = Profile.load(path)
    assert profile.header == header
    first, last = (Launch("cutlass_b", grid, (128, 1, 1), 0) for grid in ((4, 1, 1), (2, 3, 4)))
    assert profile.measurements[0].launches == (first, Launch("nvjet_a", (132, 1, 1), (384, 1, 1), 200_000), last)
    assert profile.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_point_is_rounded_up_and_none_where_it_is_missing(profile_file) -> None:
    profile = Profile.load(profile_file.row("linear", SHAPE, 1500.5).write())
    assert profile.point(linear(1, 64, 64)) == 1501
    assert profile.point(linear(1, 64, 65)) is None
    assert profile.point(linear(1, 64, 64), "fp16") is None


def test_rows_of_are_sorted_along_the_axis_and_hold_the_others_fixed(profile_file) -> None:
    profile_file.ranks({128: 3.0, 8: 1.0, 64: 2.0}).ranks({8: 9.0}, m=1)
    sweep = Profile.load(profile_file.write()).rows_of("low_rank", FIXED, "r")
    assert (sweep.dims.tolist(), sweep.ns.tolist()) == ([8, 64, 128], [1.0, 2.0, 3.0])
    assert sweep.label == "low_rank bf16 m=1024 k=4096 n=4096, r"


ALIGNED = {1000: 30.0, 1008: 40.0, 1016: 32.0, 1023: 170.0, 1024: 31.0, 1025: 180.0, 1032: 33.0}
MIXED = {1003: 100.0, 1004: 50.0, 1008: 30.0, 1017: 200.5, 1021: 150.0}


@pytest.mark.parametrize(
    ("known", "requested", "expected"),
    [
        (ALIGNED, (1000, 1008, 1020, 1024, 1027), [30, 40, -1, 31, -1]),  # it stays in the alignment class
        (MIXED, (1009, 1019), [201, 201]),  # between the nearest of its class a dim is as slow as the slower of them
        ({64: 1.0, 128: 2.0}, (0, 192, 129), [-1, -1, -1]),  # there is no extrapolation
        ({64: 1.0, 192: 2.0, 1024: 10.0, 1280: 20.0}, (128, 1088), [-1, 20]),  # brackets that are too far apart
    ],
)
def test_latency_is_measured_or_interpolated(profile_file, known, requested, expected) -> None:
    profile = Profile.load(profile_file.ranks(known).write())
    latency, measured = profile.latency("low_rank", FIXED, "r", dims(*requested))
    assert latency.tolist() == expected
    assert measured.tolist() == [dim in known for dim in requested]


@given(
    st.dictionaries(st.integers(1, 600), st.floats(1.0, 1e6), min_size=1, max_size=60),
    st.lists(st.integers(1, 700), min_size=1, max_size=60),
)
def test_an_interpolated_value_lies_between_measured_ones_of_its_class(points, requested) -> None:
    latency, measured = interpolate(make_sweep(points), dims(*requested))
    for dim, ns, exact in zip(requested, latency, measured, strict=True):
        assert exact == (dim in points)
        if not exact and ns >= 0:
            step = min(dim & -dim, 64)
            same = {known for known in points if min(known & -known, 64) == step}
            below, above = max(d for d in same if d < dim), min(d for d in same if d > dim)
            low, high = sorted((points[below], points[above]))
            assert low - 1 <= ns <= high + 1


NONE = "is none of the 1 rows above it with a number"
LOST, AGAIN = {"record": "lost", "row": 0, "error": "x"}, {"record": "again", "row": 0, "median_ns": 1.0}
HEADER, ROW = 0, 1


@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (ROW, {"colour": "red"}, "2: colour: Object contains unknown field `colour`"),
        (ROW, {"samples": "10"}, "2: samples: Expected `int`, got `str`"),
        (ROW, {"cache": "warm"}, "2: cache: Invalid enum value 'warm'"),
        (ROW, {"shape": {"m": 0}}, "2: shape[...]: Expected `int` >= 1"),
        (ROW, {"record": "rows"}, "2: record: Invalid value 'rows'"),
        (ROW, {"median_ns": -1.0}, "2: median_ns: Expected `float` >= 0.001"),
        (ROW, {"median_ns": float("nan")}, "2: the line: Invalid JSON"),
        (ROW, {"median_ns": None}, "2: median_ns: None with iqr_ns 0.001 and error None"),
        (ROW, {"error": "no memory"}, "2: median_ns: 1.0 with iqr_ns 0.001 and error 'no memory'"),
        (ROW, {"launches": [[0, 1, 1, 1]]}, "2: launches: kernel 0 of 0 above it"),
        (HEADER, {"compute_capability": "banana"}, "1: header.compute_capability: Expected `str` matching regex"),
        (HEADER, {"gpu": "NVIDIA\x1b[31m"}, "1: 'gpu' holds a control character: 'NVIDIA\\x1b[31m'"),
        (HEADER, {"fan": 1}, "1: header.fan: Object contains unknown field `fan`"),
        (HEADER, {"schema_version": 1, "new_field": 1}, "1: header.schema_version is 1"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(profile_file, line, change, message) -> None:
    fields = profile_file.row("linear", SHAPE, 1.0).lines[line]
    (fields["header"] if line == HEADER else fields).update(change)
    check_refused(profile_file.write(), message)


@pytest.mark.parametrize(
    ("spoil", "tail", "message"),
    [
        (lambda file: file.lines[1].pop("dtype"), "", "2: dtype: Object missing required field `dtype`"),
        (lambda file: file.lines.pop(0), "", "1: no header with a schema_version"),
        (lambda file: file.lines.append(file.lines[0]), "", "3: a header line"),
        (lambda file: file.row("linear", SHAPE, 2.0), "", f"3: linear {SHAPE} is there twice"),
        (lambda file: file.row("linear", {"m": 1, "n": 2}, 1.0), "", "3: shape: linear has axes m, n, above m, k, n"),
        (lambda file: file.lines.append(AGAIN | {"row": 1}), "", f"3: row: 1 {NONE}"),
        (lambda file: file.lines.extend([LOST, AGAIN]), "", f"4: row: 0 {NONE}"),
        (lambda file: file.lines.extend([LOST, LOST]), "", f"4: row: 0 {NONE}"),
        (lambda file: None, "\n", "3: the line: Invalid JSON"),
        (lambda file: None, '{"record":"row","oper\n', "3: the line: Invalid JSON"),
    ],
)
def test_a_wrong_line_is_refused(profile_file, spoil, tail, message) -> None:
    spoil(profile_file.row("linear", SHAPE, 1.0))
    check_refused(profile_file.write(tail), message)


def check_refused(path: Path, message: str) -> None:
    assert_refused(lambda: Profile.load(path), f"{path}:{message}", error=ProfileError)


@pytest.mark.parametrize("content", [b"", b'{"record":"hea', b"\xff\xfe\n", b"[" * 10**5 + b"\n"])
def test_what_is_no_profile_and_a_name_that_is_too_long_for_a_path_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"x\.jsonl"):
        Profile.load(path)
    with pytest.raises(ProfileError, match=r"profile 'x{200}\.\.\.' is neither a file nor a known name"):
        Profile.load("x" * 5000)


def test_a_last_line_cut_short_by_a_kill_is_ignored(profile_file) -> None:
    path = profile_file.row("linear", SHAPE, 1.0).write(tail='{"record":"row","oper')
    assert len(Profile.load(path).measurements) == 1


def test_a_number_is_the_median_of_its_passes_and_their_spread_is_its_noise(profile_file) -> None:
    profile_file.ranks({8: 100.0, 16: 200.0})
    for row, ns in ((0, 104.0), (1, 200.0), (0, 130.0)):
        profile_file.line(record="again", row=row, median_ns=ns)
    profile = Profile.load(profile_file.write())
    first, second = profile.measurements
    assert (first.passes, first.median_ns, first.spread_ns) == ((100.0, 104.0, 130.0), 104.0, 15.0)
    assert (second.passes, second.median_ns, second.spread_ns) == ((200.0, 200.0), 200.0, 0.2)
    assert profile.point(low_rank(1024, 4096, 8, 4096)) == 104
    assert profile.spread == pytest.approx(0.95 * 30 / 104)


def test_the_sentinels_tell_how_far_the_machine_drifted(profile_file) -> None:
    profile_file.ranks({8: 100.0, 16: 200.0})
    for ns in (100.0, 101.0, 100.0, 99.0, 104.0, 150.0, 103.0, 104.0):
        profile_file.line(record="sentinel", row=0, median_ns=ns)
    profile_file.line(record="sentinel", row=1, median_ns=300.0)
    profile = Profile.load(profile_file.write())
    assert profile.sentinels == {0: (100.0, 101.0, 100.0, 99.0, 104.0, 150.0, 103.0, 104.0), 1: (300.0,)}
    assert profile.drift == pytest.approx(0.04)
    assert [row.passes for row in profile.measurements] == [(100.0,), (200.0,)]


def test_a_saved_profile_is_found_by_its_name(profile_file, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "profiles"
    folder.mkdir(parents=True)
    profile_file.ranks({8: 1.0}).write().rename(folder / "nvidia-test-gpu.jsonl")
    assert folders.saved_profiles() == (folder / "nvidia-test-gpu.jsonl",)
    assert Profile.load("nvidia-test-gpu").header.gpu == "NVIDIA Test GPU"


def test_shipped_profiles_are_found_inside_an_installed_package(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(folders, "__file__", str(tmp_path / "site" / "gac" / "profiling" / "folders.py"))
    assert folders.shipped_profiles() == ()
    inside = tmp_path / "site" / "gac" / "_profiles"
    inside.mkdir(parents=True)
    (inside / "a-b.jsonl").touch()
    (inside / "a.jsonl").touch()
    assert [path.name for path in folders.shipped_profiles()] == ["a.jsonl", "a-b.jsonl"]


def test_the_shipped_profile_holds_every_shape_of_the_known_models() -> None:
    h100 = Profile.load("nvidia-h100-80gb-hbm3")
    measured = {row.point for row in h100.measurements}
    assert all(set(model_points(model)) <= measured for model in SHAPES)
    assert all(row.launches for row in h100.measurements if not row.error)
    assert h100.converged_fraction > 0.99
    assert h100.spread < 0.06


GEMMA = Path(__file__).parents[1] / "benchmarks/results/gemma3-270m-h200.jsonl"
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


@pytest.mark.parametrize(
    ("operator", "shape", "gap"),
    [
        ("linear", (3, 4096, 4096), r"\d+ shapes with m=3 and this alignment in the table; a model needs 32"),
        ("linear", (1, 400_000, 4096), "no measured shape within a factor of 4 in every size"),
        ("linear", (1, 64, 64), "neither side of the weight reaches 256"),
        ("all_reduce", (1, 4096, 8), "no model of all_reduce, which has to be measured"),
    ],
)
def test_what_a_table_lacks_is_said(operator: str, shape: tuple[int, ...], gap: str) -> None:
    profile, axes = Profile.load("nvidia-h100-80gb-hbm3"), OPERATORS.get(operator).axes
    assert re.fullmatch(gap, profile.model.gap(operator, "bf16", axes, shape))


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
