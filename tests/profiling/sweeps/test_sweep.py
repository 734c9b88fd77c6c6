"""Sweeps into a file, which resume where they stopped, and several GPUs that measure one table."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from gac.core.errors import ProfileError
from gac.forms.low_rank import low_rank
from gac.profiling.records import DeviceLostError, Header, Launch, Measurement, Point
from gac.profiling.sweeps import multi_gpu, sweep
from gac.profiling.sweeps.journal import Journal
from gac.profiling.sweeps.multi_gpu import check_agree, common_header
from gac.profiling.sweeps.profiler import profile_gpu
from gac.profiling.sweeps.sweep import run_sweep
from gac.profiling.table import Profile
from gac.profiling.timing.sampling import Batch, Clocks, sample_until
from gac_extensions.lab.cliffs import count_false_alarms

POINTS = [Point(low_rank(1, 64, rank, 64)) for rank in range(1, 31)]
ODD, EVEN = Launch("gemm_odd", (2, 1, 1), (128, 1, 1), 0), Launch("gemm", (3, 1, 1), (384, 1, 1), 200_000)


def rank_of(point: Point) -> int:
    return point.operation.axes["r"]


class FakeMeasurer:
    """Takes 100 ns a unit of rank; fails or loses the device at a rank, or is interrupted after some."""

    def __init__(self, fails: int = -1, lost_at: int = -1, interrupted_after: int = 1000) -> None:
        self.fails, self.lost_at, self.interrupted_after = fails, lost_at, interrupted_after
        self.measured, self.checked = list[Point](), list[bool]()

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        if len(self.measured) == self.interrupted_after:
            raise KeyboardInterrupt
        self.measured.append(point)
        self.checked.append(checked)
        if rank_of(point) == self.lost_at:
            raise DeviceLostError(Measurement.failed(point, "out of memory"))
        if rank_of(point) == self.fails:
            return Measurement.failed(point, "out of memory")
        return Measurement.of(point, 100.0 * rank_of(point), 1.0, 10, 1980, True)

    def launches(self, points) -> list[tuple[Launch, ...]]:
        return [(ODD,) if rank_of(point) % 2 else (EVEN, EVEN) for point in points]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "gpu.jsonl"


@pytest.fixture
def run(path, header):
    """Run a sweep into the file; returns the number of timings."""

    def run(points=POINTS, measurer=None, passes=3, path=path, seconds=None, **changed) -> int:
        here = replace(header, **changed)
        return run_sweep(points, path, measurer or FakeMeasurer(), here, passes, seconds, progress=False)

    return run


def test_a_sweep_writes_every_shape_with_its_kernels(path, run) -> None:
    assert run(measurer=FakeMeasurer(fails=7), passes=1) == 30
    profile = Profile.load(path)
    rows = {row.shape["r"]: row for row in profile.measurements}
    assert {row.point for row in profile.measurements} == set(POINTS)
    assert (rows[3].launches, rows[4].launches) == ((ODD,), (EVEN, EVEN))
    assert [row.shape["r"] for row in profile.failed] == [7]


def test_each_pass_has_another_order_which_is_always_the_same(run, tmp_path) -> None:
    first, second = FakeMeasurer(), FakeMeasurer()
    run(measurer=first, passes=2)
    run(measurer=second, passes=2, path=tmp_path / "other.jsonl")
    assert first.measured == second.measured
    assert POINTS != first.measured[:30] != first.measured[30:60]
    assert set(first.measured[:30]) == set(first.measured[30:60]) == set(POINTS)
    assert first.checked[:60] == [False] * 30 + [True] * 30


def test_a_sweep_resumes_where_an_interrupt_stopped_it(path, run) -> None:
    for interrupted_after in (12, 30):
        with pytest.raises(KeyboardInterrupt):
            run(measurer=FakeMeasurer(interrupted_after=interrupted_after))
    assert sorted(len(row.passes) for row in Profile.load(path).measurements) == [1] * 18 + [2] * 12
    assert run(passes=2) == 18
    assert {len(row.passes) for row in Profile.load(path).measurements} == {2}


def test_a_time_limit_stops_a_sweep_and_the_next_run_goes_on(path, run, monkeypatch) -> None:
    clock = SimpleNamespace(monotonic=partial(next, count()))
    monkeypatch.setattr(sweep, "time", clock)
    timed = run(seconds=40, passes=1)
    assert 0 < timed == len(Profile.load(path).measurements) < 30
    assert run(passes=1) == 30 - timed
    assert {row.point for row in Profile.load(path).measurements} == set(POINTS)


def test_a_complete_file_is_not_changed_and_a_partial_last_line_is_cut_off(path, run) -> None:
    run(POINTS[:10])
    before, again = path.read_bytes(), FakeMeasurer()
    assert run(POINTS[:10], again) == 0
    assert again.measured == []
    assert path.read_bytes() == before
    path.write_bytes(before + b'{"record":"row","oper')
    run(POINTS[:20])
    assert {row.point for row in Profile.load(path).measurements} == set(POINTS[:20])


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"gpu": "NVIDIA A100", "driver": "570.0", "date": "2027-01-01"}, "driver '580.1' where this machine has"),
        ({"device": "fedcba9876543210"}, "device '0123456789abcdef' where"),  # another GPU of the same model
        ({"triton": None}, "has triton '3.6.0' where this machine has None"),
    ],
)
def test_a_file_of_another_machine_is_refused_and_not_changed(path, run, changed, difference) -> None:
    run(POINTS[:3], triton="3.6.0")
    before = path.read_bytes()
    with pytest.raises(ProfileError, match=difference):
        run(**({"triton": "3.6.0"} | changed))
    assert path.read_bytes() == before


def test_one_file_has_one_writer(path, header, run) -> None:
    with Journal(path, header), pytest.raises(ProfileError, match=r"gpu\.jsonl is being written by another process"):
        run()


def test_a_full_disk_stops_the_sweep_and_keeps_every_complete_line(path, header, run, monkeypatch) -> None:
    run(POINTS[:5], passes=1)
    with Journal(path, header) as journal:
        file = journal._file
        full = SimpleNamespace(write=lambda data: file.write(data[:50]), fileno=file.fileno, close=file.close)
        monkeypatch.setattr(journal, "_file", full)
        with pytest.raises(ProfileError, match=r"gpu\.jsonl cannot be written to the end: no room"):
            journal.add(FakeMeasurer().measure(POINTS[6]))
    assert len(Profile.load(path).measurements) == 5
    run(passes=1)
    assert len(Profile.load(path).measurements) == 30


def test_three_sentinels_are_timed_again_and_again(path, run, monkeypatch) -> None:
    monkeypatch.setattr(sweep, "SENTINEL_SECONDS", 0.0)
    run(passes=1)
    profile = Profile.load(path)
    assert sorted(profile.measurements[row].shape["r"] for row in profile.sentinels) == [6, 16, 26]
    assert all(len(timings) > 1 for timings in profile.sentinels.values())
    assert all(len(row.passes) == 1 for row in profile.measurements)


LOST = "the GPU failed at low_rank bf16 m=1 k=64 r=11 n=64: out of memory"


def lost_at_11(path: Path) -> Profile:
    """The profile, in which this shape alone has failed."""
    profile = Profile.load(path)
    assert [(row.shape["r"], row.error, row.median_ns) for row in profile.failed] == [(11, "out of memory", None)]
    return profile


def test_a_device_lost_in_a_later_pass_removes_the_shapes_number(path, run) -> None:
    run(passes=1)
    with pytest.raises(ProfileError, match=LOST):
        run(measurer=FakeMeasurer(lost_at=11), passes=2)
    run(measurer=FakeMeasurer(lost_at=11), passes=2)
    assert {len(row.passes) for row in lost_at_11(path).measurements} == {0, 2}


def test_two_halves_that_differ_are_false_cliffs(profile_file) -> None:
    profile_file.ranks(dict.fromkeys(range(8, 81, 8), 100.0))
    with pytest.raises(ProfileError, match=r"has no sweep that was timed an even number of times"):
        count_false_alarms(Profile.load(profile_file.write()))
    for row in range(10):
        for ns in (115.0 if row == 3 else 101.0, 100.0, 115.0 if row == 3 else 101.0):
            profile_file.line(record="again", row=row, median_ns=ns)
    report = count_false_alarms(Profile.load(profile_file.write()))
    assert (report.dims, report.false_cliffs, report.fraction) == (10, 3, 0.3)  # the three dims below the fast one
    assert "A/A: 3 false cliffs in 10 dims (30.00%); A and B differ by 0.99% in the median, 13.0%" in str(report)


def test_a_failure_of_one_measurer_stops_the_others(path, run) -> None:
    with pytest.raises(ProfileError, match=LOST):
        run(measurer=[FakeMeasurer(lost_at=11), FakeMeasurer(lost_at=11)])
    rows = len(lost_at_11(path).measurements)
    assert run(passes=1) == 30 - rows


def test_later_facts_about_other_gpus_are_in_the_header(path, run) -> None:
    run(POINTS[:3], passes=1)
    run(POINTS[:6], passes=1, link="NVLink", others=("b",))
    run(POINTS[:9], passes=1)
    run(POINTS[:9], passes=2, others=("a",))
    header = Profile.load(path).header
    assert (header.link, header.others) == ("NVLink", ("a", "b"))
    with pytest.raises(ProfileError, match="link 'NVLink' where this machine has 'PCIe'"):
        run(link="PCIe")


MAX_MHZ = 1980


@dataclass
class SyntheticGpu:
    """Measures as ``GpuMeasurer`` does; ``latency`` is in ns, ``noise`` a sample's relative standard deviation."""

    latency: Callable[[Point], float]
    noise: float = 0.003
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        def sampler(count: int) -> Batch:
            samples = self.latency(point) * (1 + self.noise * self.random.standard_normal(count))
            return Batch(list(np.abs(samples)), MAX_MHZ)

        timing = sample_until(sampler, Clocks(0.98 * MAX_MHZ, MAX_MHZ), lambda discarded: None)
        clock = timing.sm_clock_mhz
        return Measurement.of(point, timing.median_ns, timing.iqr_ns, timing.samples, clock, timing.converged)

    def launches(self, points: Sequence[Point]) -> list[tuple[Launch, ...]]:
        return [()] * len(points)


def gpu(factor: float = 1.0, noise: float = 0.003) -> SyntheticGpu:
    return SyntheticGpu(lambda point: factor * 100 * point.operation.axes["r"], noise)


class Failing:
    """A GPU whose results are wrong."""

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        assert not checked
        return Measurement.failed(point, "fell off the bus")


class Lost(Failing):
    def measure(self, point: Point, checked: bool = False) -> Measurement:
        raise DeviceLostError(super().measure(point, checked))


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ([gpu(), gpu(0.99), gpu(1.1)], r"^GPU 2 takes 1\d\.\d% longer than GPU 1 for low_rank bf16 m=1 k=64 r=6 n=64;"),
        ([gpu(), Lost()], "a GPU failed at low_rank bf16 m=1 k=64 r=6 n=64: fell off the bus"),
    ],
)
def test_a_slower_or_failing_gpu_is_named(gpus, message) -> None:
    check_agree(POINTS, [gpu(), gpu(1.02), gpu(noise=0.03), Failing()])  # by noise, or with wrong results
    with pytest.raises(ProfileError, match=message):
        check_agree(POINTS, gpus)


def test_common_header_names_all_gpus_and_their_users_and_a_different_gpu_is_refused(header) -> None:
    others = [replace(header, device="b", date="2027-01-01"), replace(header, device="a", shared_with="1 process")]
    expected = replace(header, others=("a", "b"), shared_with="GPU 2: 1 process")
    assert common_header([header, *others]) == expected
    for name, value in (("power_limit_w", 350.0), ("gpu", "NVIDIA A100")):
        message = f"GPU 1 has {name} {value!r}, where GPU 0 has {getattr(header, name)!r}"
        with pytest.raises(ProfileError, match=message):
            common_header([header, replace(header, **{name: value})])


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, header: Header) -> list[int]:
    """A host of three synthetic GPUs, in threads instead of processes; lists the GPUs that were begun."""
    begun: list[int] = []
    number = threading.local()

    def begin(gpu: int) -> None:
        number.gpu = gpu
        begun.append(gpu)

    def executor(workers, _context, begin, args) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(workers, initializer=begin, initargs=args)

    monkeypatch.setattr(multi_gpu, "ProcessPoolExecutor", executor)
    monkeypatch.setattr(multi_gpu, "_begin", begin)
    monkeypatch.setattr(multi_gpu, "fingerprint", lambda: replace(header, device=f"gpu {number.gpu}"))
    monkeypatch.setattr(multi_gpu, "GpuMeasurer", lambda _header: gpu())
    monkeypatch.setattr(multi_gpu, "_measurer", [])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    return begun


def test_gpus_of_a_host_measure_one_table(host, tmp_path) -> None:
    path = profile_gpu(POINTS, tmp_path / "table.jsonl", passes=2, gpus=3)
    profile = Profile.load(path)
    assert sorted(host) == [0, 1, 2]
    assert (profile.header.device, profile.header.others) == ("gpu 0", ("gpu 1", "gpu 2"))
    assert {len(row.passes) for row in profile.measurements} == {2}
    assert {row.point for row in profile.measurements} == set(POINTS)


def test_too_many_gpus_and_a_dead_process_are_named(host, tmp_path, monkeypatch) -> None:
    with pytest.raises(ProfileError, match="4 GPUs where PyTorch sees 3; expected at most as many as there are"):
        profile_gpu(POINTS, tmp_path / "table.jsonl", gpus=4)

    def die() -> Header:
        raise BrokenProcessPool

    monkeypatch.setattr(multi_gpu, "fingerprint", die)
    with pytest.raises(ProfileError, match="the process that measures GPU 0 has ended"):
        profile_gpu(POINTS, tmp_path / "table.jsonl", gpus=2)
