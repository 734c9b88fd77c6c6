import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gac.core.errors import ProfileError
from gac.core.operations import linear
from gac.forms.low_rank import low_rank
from gac.models.shapes import SHAPES
from gac.profiling import folders
from gac.profiling.records import Launch
from gac.profiling.sweeps.coverage import model_points
from gac.profiling.table import Profile, interpolate
from tests.profiling.synthetic import make_sweep
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
