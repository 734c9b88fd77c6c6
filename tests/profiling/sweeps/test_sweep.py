import math
import threading
import time
from pathlib import Path

import pytest
from gac.profiling.false_alarms import count_false_alarms
from msgspec.structs import replace

from gac.core.errors import ProfileError
from gac.forms.low_rank.spec import low_rank
from gac.profiling.records import DeviceLostError, Launch, Measurement, Point
from gac.profiling.sweeps import sweep
from gac.profiling.sweeps.journal import Journal
from gac.profiling.sweeps.profiler import estimate, profile_gpu, summary
from gac.profiling.sweeps.sweep import run_sweep
from gac.profiling.table import Profile
from tests.profiling.synthetic import SyntheticGpu

POINTS = [Point(low_rank(1, 64, rank, 64)) for rank in range(1, 31)]
ODD, EVEN = Launch("gemm_odd", (2, 1, 1), (128, 1, 1), 0), Launch("gemm", (3, 1, 1), (384, 1, 1), 200_000)


def failed(point: Point) -> Measurement:
    return Measurement.of(point, None, None, 0, None, False, error="out of memory")


class FakeMeasurer:
    """Says 100 ns a unit of rank; fails, loses the device, or is interrupted, where it is told."""

    def __init__(self, fails: int = -1, lost_at: int = -1, interrupted_after: int = 1000) -> None:
        self.fails = fails
        self.lost_at = lost_at
        self.left = interrupted_after
        self.measured: list[Point] = []
        self.unchecked: list[Point] = []

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.measured.append(point)
        if not checked:
            self.unchecked.append(point)
        rank = point.operation.axes["r"]
        if rank == self.lost_at:
            raise DeviceLostError(failed(point))
        return failed(point) if rank == self.fails else Measurement.of(point, 100.0 * rank, 1.0, 10, 1980, True)

    def launches(self, points) -> list[tuple[Launch, ...]]:
        return [(ODD,) if point.operation.axes["r"] % 2 else (EVEN, EVEN) for point in points]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "gpu.jsonl"


def test_a_sweep_writes_every_shape_with_its_kernels(path, header) -> None:
    assert run_sweep(POINTS, path, FakeMeasurer(fails=7), header, passes=1, progress=False) == 30
    profile = Profile.load(path)
    rows = {row.shape["r"]: row for row in profile.measurements}
    assert {row.point for row in profile.measurements} == set(POINTS)
    assert rows[3].launches == (ODD,)
    assert rows[4].launches == (EVEN, EVEN)
    assert [row.shape["r"] for row in profile.failed] == [7]


def test_the_order_is_another_in_each_pass_and_the_same_every_time(path, header, tmp_path) -> None:
    first, second = FakeMeasurer(), FakeMeasurer()
    run_sweep(POINTS, path, first, header, passes=2, progress=False)
    run_sweep(POINTS, tmp_path / "other.jsonl", second, header, passes=2, progress=False)
    assert first.measured == second.measured
    assert POINTS != first.measured[:30] != first.measured[30:60]
    assert set(first.measured[:30]) == set(first.measured[30:60]) == set(POINTS)
    assert first.unchecked == first.measured[:30]


def test_what_a_resumed_run_finds_wrong_is_not_timed_again_unchecked(path, header) -> None:
    run_sweep(POINTS, path, FakeMeasurer(), header, passes=1, progress=False)
    again = FakeMeasurer(fails=7)
    run_sweep(POINTS, path, again, header, passes=3, progress=False)
    assert [one.operation.axes["r"] for one in again.unchecked].count(7) >= 2


def test_a_sweep_resumes_where_an_interrupt_stopped_it(path, header) -> None:
    for interrupted_after in (12, 30):
        with pytest.raises(KeyboardInterrupt):
            run_sweep(POINTS, path, FakeMeasurer(interrupted_after=interrupted_after), header, progress=False)
    assert sorted(len(row.passes) for row in Profile.load(path).measurements) == [1] * 18 + [2] * 12
    assert run_sweep(POINTS, path, FakeMeasurer(), header, passes=2, progress=False) == 18
    assert {len(row.passes) for row in Profile.load(path).measurements} == {2}


def test_a_complete_file_is_left_as_it_is(path, header) -> None:
    run_sweep(POINTS, path, FakeMeasurer(), header, progress=False)
    before = path.read_bytes()
    again = FakeMeasurer()
    assert run_sweep(POINTS, path, again, header, progress=False) == 0
    assert again.measured == []
    assert path.read_bytes() == before


def test_a_last_line_cut_short_is_cut_off_before_going_on(path, header) -> None:
    run_sweep(POINTS[:10], path, FakeMeasurer(), header, progress=False)
    path.write_bytes(path.read_bytes() + b'{"record":"row","oper')
    run_sweep(POINTS[:20], path, FakeMeasurer(), header, progress=False)
    assert {row.point for row in Profile.load(path).measurements} == set(POINTS[:20])


def test_a_time_limit_stops_cleanly(path, header) -> None:
    assert run_sweep(POINTS, path, FakeMeasurer(), header, seconds=0, progress=False) == 0
    assert len(Profile.load(path).measurements) == 0


@pytest.mark.parametrize(
    ("changed", "differences"),
    [
        (
            {"gpu": "NVIDIA A100", "driver": "570.0", "date": "2027-01-01"},
            "gpu 'NVIDIA Test GPU' where this machine has 'NVIDIA A100', driver '580.1' where this machine has '570.0'",
        ),
        (
            {"device": "fedcba9876543210"},  # another GPU of the same model
            "device '0123456789abcdef' where this machine has 'fedcba9876543210'",
        ),
    ],
)
def test_a_file_of_another_machine_is_refused_and_left_alone(path, header, changed, differences) -> None:
    run_sweep(POINTS[:3], path, FakeMeasurer(), header, progress=False)
    before = path.read_bytes()
    with pytest.raises(ProfileError) as caught:
        run_sweep(POINTS, path, FakeMeasurer(), replace(header, **changed), progress=False)
    assert str(caught.value) == (
        f"profile {path} has {differences}; expected a file begun on this machine with this software. "
        "Write to another file."
    )
    assert path.read_bytes() == before


def test_another_triton_is_other_software_but_a_file_that_tells_none_goes_on(path, header) -> None:
    known = replace(header, triton="3.6.0")
    run_sweep(POINTS[:3], path, FakeMeasurer(), known, progress=False)
    for here, said in (("3.7.0", "'3.7.0'"), (None, "None")):
        with pytest.raises(ProfileError, match=f"has triton '3.6.0' where this machine has {said}; expected a file"):
            run_sweep(POINTS, path, FakeMeasurer(), replace(header, triton=here), progress=False)
    before = path.with_name("before.jsonl")
    run_sweep(POINTS[:3], before, FakeMeasurer(), header, progress=False)
    run_sweep(POINTS, before, FakeMeasurer(), known, progress=False)
    assert len(Profile.load(before).measurements) == len(POINTS)


def test_a_malformed_file_is_refused_and_left_alone(path, header) -> None:
    path.parent.mkdir()
    path.write_text("not a profile\n")
    with pytest.raises(ProfileError, match=r"gpu\.jsonl:1: no header"):
        run_sweep(POINTS, path, FakeMeasurer(), header, progress=False)
    assert path.read_text() == "not a profile\n"


def test_one_file_has_one_writer(path, header) -> None:
    with Journal(path, header), pytest.raises(ProfileError, match=r"gpu\.jsonl is being written by another process"):
        run_sweep(POINTS, path, FakeMeasurer(), header, progress=False)


def test_a_full_disk_stops_the_sweep_and_keeps_every_whole_line(path, header, monkeypatch) -> None:
    run_sweep(POINTS[:5], path, FakeMeasurer(), header, passes=1, progress=False)
    with Journal(path, header) as journal:
        monkeypatch.setattr(journal, "_file", FullAfter(journal._file, 50))
        with pytest.raises(ProfileError, match=r"gpu\.jsonl cannot be written to the end: no room; expected room for"):
            journal.add(FakeMeasurer().measure(POINTS[6]))
    assert len(Profile.load(path).measurements) == 5
    run_sweep(POINTS, path, FakeMeasurer(), header, passes=1, progress=False)
    assert len(Profile.load(path).measurements) == 30


class FullAfter:
    """A file that has room for so many bytes more."""

    def __init__(self, file, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        return self._file.write(data[: self._room])

    def __getattr__(self, name: str):
        return getattr(self._file, name)


def test_three_sentinels_are_timed_again_and_again(path, header, monkeypatch) -> None:
    monkeypatch.setattr(sweep, "SENTINEL_SECONDS", 0.0)
    run_sweep(POINTS, path, FakeMeasurer(), header, passes=1, progress=False)
    profile = Profile.load(path)
    assert sorted(profile.measurements[row].shape["r"] for row in profile.sentinels) == [6, 16, 26]
    assert all(len(timings) > 1 for timings in profile.sentinels.values())
    assert all(len(row.passes) == 1 for row in profile.measurements)


def test_a_machine_that_drifts_is_found_out(path, header, monkeypatch) -> None:
    monkeypatch.setattr(sweep, "SENTINEL_SECONDS", 0.0)
    gpu = SyntheticGpu(lambda point: 1000.0, noise=0.001, drift=10.0)
    run_sweep(POINTS, path, gpu, header, passes=1, progress=False)
    profile = Profile.load(path)
    assert profile.drift > 0.03
    assert "DOUBTFUL: the sentinels drifted by" in summary(profile)


def test_a_device_lost_in_a_later_pass_takes_the_shapes_number_away(path, header) -> None:
    run_sweep(POINTS, path, FakeMeasurer(), header, passes=1, progress=False)
    with pytest.raises(ProfileError, match="the GPU failed at low_rank bf16 m=1 k=64 r=11 n=64: out of memory"):
        run_sweep(POINTS, path, FakeMeasurer(lost_at=11), header, passes=2, progress=False)
    run_sweep(POINTS, path, FakeMeasurer(lost_at=11), header, passes=2, progress=False)
    profile = Profile.load(path)
    assert [(row.shape["r"], row.error, row.median_ns) for row in profile.failed] == [(11, "out of memory", None)]
    assert {len(row.passes) for row in profile.measurements} == {0, 2}


def test_a_device_lost_while_kernels_are_looked_up_marks_the_shape_that_did_it(path, header) -> None:
    class Fragile(FakeMeasurer):
        def launches(self, points) -> list[tuple[Launch, ...]]:
            for point in points:
                if point.operation.axes["r"] == 11:
                    raise DeviceLostError(failed(point))
            return super().launches(points)

    with pytest.raises(ProfileError, match="the GPU failed at low_rank bf16 m=1 k=64 r=11 n=64: out of memory"):
        run_sweep(POINTS, path, Fragile(), header, passes=1, progress=False)
    assert [row.shape["r"] for row in Profile.load(path).failed] == [11]
    assert run_sweep(POINTS, path, Fragile(), header, passes=1, progress=False) == 29


def test_a_complete_file_of_another_machine_is_refused_before_anything_is_said_of_it(path, header, monkeypatch) -> None:
    run_sweep(POINTS, path, FakeMeasurer(), header, progress=False)
    here = replace(header, driver="600.0")
    monkeypatch.setattr("gac.profiling.sweeps.profiler.fingerprint", lambda: here)
    for ask in (profile_gpu, estimate):
        with pytest.raises(ProfileError, match=r"has driver '580\.1' where this machine has '600\.0'"):
            ask(POINTS, path)


def test_a_gpu_that_was_shared_when_the_file_was_resumed_is_said_with_every_summary(path, header) -> None:
    run_sweep(POINTS[:3], path, FakeMeasurer(), header, passes=1, progress=False)
    for _ in range(2):
        busy = replace(header, shared_with="2 other processes on it")
        run_sweep(POINTS[:6], path, FakeMeasurer(), busy, passes=1, progress=False)
    assert Profile.load(path).header.shared_with == "2 other processes on it"
    assert summary(Profile.load(path)).endswith("; DOUBTFUL: 2 other processes on it")
    assert path.read_text().count('"record":"shared"') == 1


# --- the same shape as A and as B ---


def test_equal_shapes_seldom_look_like_cliffs(path, header) -> None:
    many = [Point(low_rank(1, 64, rank, 64)) for rank in range(1, 1001)]
    gpu = SyntheticGpu(lambda point: 5000.0, noise=0.01, throttled=0.05)
    run_sweep(many, path, gpu, header, passes=6, progress=False)
    report = count_false_alarms(Profile.load(path))
    assert report.dims == 1000
    assert report.false_cliffs <= 1
    assert report.median_difference < 0.01


def test_two_halves_that_differ_are_false_cliffs(profile_file) -> None:
    profile_file.ranks(dict.fromkeys(range(8, 81, 8), 100.0))
    for row in range(10):
        for ns in (115.0 if row == 3 else 101.0, 100.0, 115.0 if row == 3 else 101.0):
            profile_file.line(record="again", row=row, median_ns=ns)
    report = count_false_alarms(Profile.load(profile_file.write()))
    assert (report.dims, report.false_cliffs, report.fraction) == (10, 3, 0.3)  # the three dims below the fast one
    assert str(report) == (
        "A/A: 3 false cliffs in 10 dims (30.00%); A and B differ by 0.99% in the median, 13.0% at most"
    )


def test_one_pass_is_no_comparison(profile_file) -> None:
    profile = Profile.load(profile_file.ranks(dict.fromkeys(range(8, 81, 8), 100.0)).write())
    with pytest.raises(ProfileError, match=r"has no sweep that was timed an even number of times; .* gac profile --aa"):
        count_false_alarms(profile)


# --- the whole job ---


def test_a_wrong_number_of_passes_is_named(tmp_path) -> None:
    with pytest.raises(ProfileError, match=r"0 passes; expected at least 1\. Use 3, the default\."):
        profile_gpu(POINTS, path=tmp_path / "x.jsonl", passes=0)


def test_a_summary_says_how_far_a_profile_can_be_trusted(path, header) -> None:
    run_sweep(POINTS, path, FakeMeasurer(fails=7), header, progress=False)
    assert summary(Profile.load(path)) == (
        "30 shapes of NVIDIA Test GPU, 1 failed; 100.0% converged, passes within 0.0% for 95 %, drift 0.0%"
    )


def test_rows_of_schemes_are_written_read_and_gone_on_with_as_others_are(path, header) -> None:
    points = [*POINTS, *(Point(point.operation, "w4a16:64") for point in POINTS)]
    with pytest.raises(KeyboardInterrupt):
        run_sweep(points, path, FakeMeasurer(interrupted_after=40), header, passes=2, progress=False)
    assert run_sweep(points, path, FakeMeasurer(), header, passes=2, progress=False) == 80
    profile = Profile.load(path)
    assert {row.point for row in profile.measurements} == set(points)
    assert all(len(row.passes) == 2 for row in profile.measurements)
    sweep_of = {one.dtype: one for one in profile.sweeps()}
    assert sweep_of["w4a16:64"].label == "low_rank w4a16:64 m=1 k=64 n=64, r"
    assert sweep_of["w4a16:64"].ns.tolist() == sweep_of["bf16"].ns.tolist()
    assert profile.point(low_rank(1, 64, 8, 64), "w4a16:64") == 800
    assert profile.point(low_rank(1, 64, 8, 64), "w4a16") is None


# --- several GPUs at once ---


class Together(FakeMeasurer):
    """Measures one point at a time, and goes on when all others have begun and two ask each: all have a share."""

    def __init__(self, started: threading.Barrier) -> None:
        super().__init__(fails=7)
        self.started, self.asking, self.alone = started, set[int](), threading.Lock()

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        if threading.get_ident() not in self.asking and len(self.asking) < 2:
            self.asking.add(threading.get_ident())
            self.started.wait(60)
        with self.alone:
            return super().measure(point, checked)


def test_several_measurers_share_a_sweep(path, header) -> None:
    started = threading.Barrier(2 * 3)
    several = [Together(started) for _ in range(3)]
    points = [Point(low_rank(1, 64, rank, 64)) for rank in range(1, 400)]
    first, *beside = several
    assert run_sweep(points, path, first, header, passes=2, progress=False, beside=beside) == 2 * 399
    measured = [one.point for one in Profile.load(path).measurements]
    assert len(measured) == len(set(measured)) == 399
    assert {len(one.passes) for one in Profile.load(path).measurements if not one.error} == {2}
    assert all(len(one.measured) > 3 for one in several)  # more than the sentinels
    assert sorted(one.operation.axes["r"] for each in several for one in each.unchecked) == [*range(1, 400)]


def test_of_those_that_ask_a_measurer_one_times_the_sentinels(path, header, monkeypatch) -> None:
    run = sweep._Run(POINTS, None, [FakeMeasurer(), FakeMeasurer()], math.inf, lambda: None)
    assert [run._sentinels_due(lane) for lane in (0, 1)] == [False, False]
    later = time.monotonic() + sweep.SENTINEL_SECONDS
    monkeypatch.setattr(sweep.time, "monotonic", lambda: later)
    assert [run._sentinels_due(lane) for lane in (0, 0, 1, 1)] == [True, False, True, False]


def test_one_of_several_that_fails_stops_the_others(path, header) -> None:
    with pytest.raises(ProfileError, match="the GPU failed at low_rank bf16 m=1 k=64 r=11 n=64: out of memory"):
        run_sweep(POINTS, path, FakeMeasurer(lost_at=11), header, progress=False, beside=[FakeMeasurer(lost_at=11)])
    profile = Profile.load(path)
    assert [(row.shape["r"], row.error) for row in profile.failed] == [(11, "out of memory")]
    assert run_sweep(POINTS, path, FakeMeasurer(), header, passes=1, progress=False) == 30 - len(profile.measurements)


def test_what_is_learned_of_other_gpus_is_in_the_header(path, header) -> None:
    run_sweep(POINTS[:3], path, FakeMeasurer(), header, passes=1, progress=False)
    linked = replace(header, link="NVLink", others=("b",))
    run_sweep(POINTS[:6], path, FakeMeasurer(), linked, passes=1, progress=False)
    run_sweep(POINTS[:9], path, FakeMeasurer(), header, passes=1, progress=False)
    run_sweep(POINTS[:9], path, FakeMeasurer(), replace(header, others=("a",)), passes=2, progress=False)
    known = Profile.load(path).header
    assert (known.link, known.others) == ("NVLink", ("a", "b"))
    with pytest.raises(ProfileError, match="link 'NVLink' where this machine has 'PCIe'"):
        run_sweep(POINTS, path, FakeMeasurer(), replace(header, link="PCIe"), progress=False)
