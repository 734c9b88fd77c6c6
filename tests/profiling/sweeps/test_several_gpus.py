"""Which GPUs may measure one table together."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import pytest
from gac.profiling.sweeps.several import check_agree, one_header
from msgspec.structs import replace

from gac.core.errors import ProfileError
from gac.forms.low_rank.spec import low_rank
from gac.profiling.records import DeviceLostError, Header, Measurement, Point
from gac.profiling.sweeps import profiler
from gac.profiling.sweeps.profiler import profile_gpu
from gac.profiling.table import Profile
from gac.profiling.timing import remote
from tests.profiling.synthetic import SyntheticGpu

POINTS = [Point(low_rank(1, 64, rank, 64)) for rank in range(1, 31)]


def gpu(factor: float = 1.0, noise: float = 0.003) -> SyntheticGpu:
    return SyntheticGpu(lambda point: factor * 100 * point.operation.axes["r"], noise)


def test_gpus_that_differ_by_noise_agree() -> None:
    check_agree(POINTS, [gpu(), gpu(1.02), gpu(noise=0.03)])


def test_a_gpu_that_is_slower_than_another_is_named() -> None:
    with pytest.raises(ProfileError) as error:
        check_agree(POINTS, [gpu(), gpu(0.99), gpu(1.1)])
    said = r"^GPU 2 takes 1\d\.\d% longer than GPU 1 for low_rank bf16 m=1 k=64 r=6 n=64; expected GPUs that differ by"
    assert error.match(said)


def test_a_gpu_that_fails_is_no_other_kind_of_crash() -> None:
    class Lost:
        def measure(self, point: Point, checked: bool = False) -> Measurement:
            raise DeviceLostError(Measurement.of(point, None, None, 0, None, False, error="fell off the bus"))

    with pytest.raises(ProfileError, match="a GPU failed at low_rank bf16 m=1 k=64 r=6 n=64: fell off the bus"):
        check_agree(POINTS, [gpu(), Lost()])


def test_a_lost_device_is_told_from_process_to_process() -> None:
    row = Measurement.of(POINTS[0], None, None, 0, None, False, error="lost")
    assert pickle.loads(pickle.dumps(DeviceLostError(row))).row == row


def test_one_header_names_all_gpus_and_who_uses_them(header) -> None:
    others = [replace(header, device="b", date="2027-01-01"), replace(header, device="a", shared_with="1 process")]
    expected = replace(header, others=("a", "b"), shared_with="GPU 2: 1 process")
    assert one_header([header, *others]) == expected


@pytest.mark.parametrize(("name", "value"), [("power_limit_w", 350.0), ("gpu", "NVIDIA A100")])
def test_a_gpu_of_another_kind_or_set_otherwise_is_refused(header, name, value) -> None:
    given = f"GPU 1 has {name} {value!r}, where GPU 0 has {getattr(header, name)!r}; expected GPUs of one kind"
    with pytest.raises(ProfileError, match=given):
        one_header([header, replace(header, **{name: value})])


# --- a process for each GPU ---


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, header: Header) -> list[int]:
    """A host of GPUs that are made up, in threads instead of processes; which of them were begun."""
    begun: list[int] = []
    number = threading.local()

    def executor(workers, _context, begin, given) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(workers, initializer=begin, initargs=given)

    def begin(gpu: int) -> None:
        number.gpu = gpu
        begun.append(gpu)

    monkeypatch.setattr(remote, "ProcessPoolExecutor", executor)
    monkeypatch.setattr(remote, "_begin", begin)
    monkeypatch.setattr(remote, "fingerprint", lambda: replace(header, device=f"gpu {number.gpu}"))
    monkeypatch.setattr(remote, "GpuMeasurer", lambda _header: gpu())
    monkeypatch.setattr(remote, "_own", [])
    monkeypatch.setattr(remote, "_lost", [])
    monkeypatch.setattr(profiler, "fingerprint", lambda: replace(header, device="gpu 0"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    return begun


def test_what_is_asked_after_a_gpu_was_lost_fails_at_the_point_that_did_it(monkeypatch) -> None:
    class Lost:
        def measure(self, point: Point, checked: bool = False) -> Measurement:
            raise DeviceLostError(Measurement.of(point, None, None, 0, None, False, error="fell off the bus"))

        launches = measure

    monkeypatch.setattr(remote, "_own", [Lost()])
    monkeypatch.setattr(remote, "_lost", [])
    first, second = (partial(remote._measure, POINTS[at], False) for at in (3, 0))
    for ask in (first, second, partial(remote._launches, ())):
        with pytest.raises(DeviceLostError) as error:
            ask()
        assert error.value.row.point == POINTS[3]


def test_a_wrong_result_is_timed_on_no_gpu() -> None:
    class Wrong:
        def measure(self, point: Point, checked: bool = False) -> Measurement:
            assert not checked
            return Measurement.of(point, None, None, 0, None, False, error="wrong result")

    check_agree(POINTS, [gpu(), Wrong()])


def test_gpus_of_a_host_measure_one_table(host, header, tmp_path) -> None:
    path = profile_gpu(POINTS, tmp_path / "table.jsonl", passes=2, gpus=3)
    found = Profile.load(path)
    assert sorted(host) == [0, 1, 2]
    assert (found.header.device, found.header.others) == ("gpu 0", ("gpu 1", "gpu 2"))
    assert {len(one.passes) for one in found.measurements} == {2}
    assert {one.point for one in found.measurements} == set(POINTS)


def test_more_gpus_than_there_are_and_a_process_that_ends_are_named(host, tmp_path, monkeypatch) -> None:
    with pytest.raises(ProfileError, match="4 GPUs where PyTorch sees 3; expected at most as many as there are"):
        profile_gpu(POINTS, tmp_path / "table.jsonl", gpus=4)

    def die() -> Header:
        raise BrokenProcessPool

    monkeypatch.setattr(remote, "fingerprint", die)
    with pytest.raises(ProfileError, match="the process that measures GPU 0 has ended"):
        profile_gpu(POINTS, tmp_path / "table.jsonl", gpus=2)
