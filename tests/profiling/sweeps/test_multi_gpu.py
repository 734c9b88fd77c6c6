"""Several GPUs that measure one table: they must be equal, each in a process of its own."""

import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
from msgspec.structs import replace

from gac.core.errors import ProfileError
from gac.forms.low_rank import low_rank
from gac.profiling.records import DeviceLostError, Header, Measurement, Point
from gac.profiling.sweeps import multi_gpu
from gac.profiling.sweeps.multi_gpu import check_agree, common_header
from gac.profiling.sweeps.profiler import profile_gpu
from gac.profiling.table import Profile
from tests.profiling.synthetic import SyntheticGpu

POINTS = [Point(low_rank(1, 64, rank, 64)) for rank in range(1, 31)]


def gpu(factor: float = 1.0, noise: float = 0.003) -> SyntheticGpu:
    return SyntheticGpu(lambda point: factor * 100 * point.operation.axes["r"], noise)


class Failing:
    """A GPU that is lost, or whose results are wrong."""

    def __init__(self, lost: bool) -> None:
        self.lost = lost

    def measure(self, point: Point, checked: bool = False) -> Measurement:
        assert not checked
        row = Measurement.failed(point, "fell off the bus")
        if self.lost:
            raise DeviceLostError(row)
        return row


def test_gpus_that_differ_by_noise_or_give_wrong_results_agree() -> None:
    check_agree(POINTS, [gpu(), gpu(1.02), gpu(noise=0.03), Failing(lost=False)])


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ([gpu(), gpu(0.99), gpu(1.1)], r"^GPU 2 takes 1\d\.\d% longer than GPU 1 for low_rank bf16 m=1 k=64 r=6 n=64;"),
        ([gpu(), Failing(lost=True)], "a GPU failed at low_rank bf16 m=1 k=64 r=6 n=64: fell off the bus"),
    ],
)
def test_a_slower_or_failing_gpu_is_named(gpus, message) -> None:
    with pytest.raises(ProfileError, match=message):
        check_agree(POINTS, gpus)


def test_common_header_names_all_gpus_and_their_users(header) -> None:
    others = [replace(header, device="b", date="2027-01-01"), replace(header, device="a", shared_with="1 process")]
    expected = replace(header, others=("a", "b"), shared_with="GPU 2: 1 process")
    assert common_header([header, *others]) == expected


@pytest.mark.parametrize(("name", "value"), [("power_limit_w", 350.0), ("gpu", "NVIDIA A100")])
def test_a_different_gpu_is_refused(header, name, value) -> None:
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
