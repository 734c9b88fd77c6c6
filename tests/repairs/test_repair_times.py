"""Times before and after: from a table without a guess, measured where there is a GPU, and the cheapest dim."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from gac.core.errors import ProfileError
from gac.core.workloads import Workload
from gac.profiling.operators import operation
from gac.profiling.records import DeviceLostError, Header, Measurement, Point
from gac.profiling.table import Profile
from gac.repairs.contract import STRATEGIES, ShapeContract
from gac.repairs.dims import Block, Run, SharedDim
from gac.repairs.run import decide
from gac.repairs.times import DTYPE, in_table, measured_dims, on_gpu, total_times
from tests.cli.commands import write_profile
from tests.headers import make_header

PREFILL = Workload.parse("prefill:1x1024")
PAIR = Block(
    (SharedDim("q_proj", 1023, ()),),
    (Run("low_rank", (("k", 4096), ("n", 4096)), "r", (("q_proj", 1),)),),
)


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    """Ranks from 960 to 1088; those that are no multiple of 8 are 2.5 or 5 times as slow."""
    return Profile.load(recorded(tmp_path, range(960, 1089)))


def recorded(tmp_path: Path, dims: Iterable[int]) -> Path:
    points = [Point(operation("low_rank", m=1024, k=4096, r=rank, n=4096)) for rank in dims]
    return write_profile(tmp_path / "recorded.jsonl", points, lambda point: point.operation.axes["r"])


def test_predicted_times_and_those_that_a_table_lacks(profile: Profile) -> None:
    dims = {"q_proj": 1023}, {"q_proj": 1024}
    times = total_times("predicted", "a GPU", [PAIR, PAIR], dims, PREFILL, in_table(profile))
    assert (times.gemms, times.before_ns, times.after_ns) == (2, 2 * 151_150, 2 * 30_240)
    assert (times.before_unknown, times.after_unknown) == (0, 0)
    dims = {"q_proj": 1023}, {"q_proj": 2048}
    times = total_times("predicted", "a GPU", [PAIR], dims, PREFILL, in_table(profile))
    assert (times.before_ns, times.after_ns, times.after_unknown) == (151_150, None, 1)


class Machine:
    """Stands in for a GPU: a launch takes the sum of its dims, in ns."""

    def __init__(self, header: Header) -> None:
        self.measured: list[Point] = []

    def measure(self, point: Point) -> Measurement:
        assert point not in self.measured
        self.measured.append(point)
        if point.operation.axes["r"] == 1:
            raise DeviceLostError(measurement(point, 1.0))
        return measurement(point, sum(point.operation.axes.values()) - 0.5)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gac.profiling.timing.device.fingerprint", make_header)
    monkeypatch.setattr("gac.profiling.timing.measure.GpuMeasurer", Machine)


def test_every_shape_is_measured_once(machine: None) -> None:
    dims = {"q_proj": 1023}, {"q_proj": 1024}
    gpu, latency = on_gpu([PAIR, PAIR], dims, [PREFILL])
    times = total_times("measured", gpu, [PAIR, PAIR], dims, PREFILL, latency)
    assert (times.gpu, times.before_ns, times.after_ns) == ("NVIDIA Test GPU", 2 * 10_239, 2 * 10_240)


def test_a_gpu_that_fails(machine: None) -> None:
    with pytest.raises(ProfileError, match=r"the GPU failed: .*; expected a GPU that runs every shape"):
        on_gpu([PAIR], ({"q_proj": 1}, {"q_proj": 8}), [PREFILL])


def measurement(point: Point, ns: float) -> Measurement:
    operation = point.operation
    return Measurement(operation.operator, operation.axes, DTYPE, "cold", ns, 1.0, 10, 1980, True)


def test_the_fastest_measured_dim_is_taken(profile: Profile, tmp_path: Path) -> None:
    by_profile = ShapeContract.named("profile")
    assert decide([PAIR], by_profile, profile, [PREFILL]) == {"q_proj": 1024}
    sparse = Profile.load(recorded(tmp_path, [960, 1022, 1056, 1088]))
    assert decide([PAIR], by_profile, sparse, [PREFILL]) == {"q_proj": 1056}
    heads = Block((SharedDim("self_attn", 3, (), form="heads"),), ())
    for strategy in STRATEGIES:
        assert decide([heads], ShapeContract.named(strategy), profile, [PREFILL]) == {"self_attn": 3}


def test_a_dim_has_to_be_measured_for_every_workload(profile: Profile) -> None:
    words = r"has measured no dim from 1023 on for q_proj \(low_rank m=1 k=4096 n=4096, r\).*gac profile --model"
    with pytest.raises(ProfileError, match=words):
        measured_dims(profile, PAIR, PAIR.shared[0], [PREFILL, Workload.parse("decode:1@1024")])


def test_gemms_that_are_alike_all_count(profile: Profile) -> None:
    twice = Block(PAIR.shared, PAIR.runs * 2)
    once = measured_dims(profile, PAIR, PAIR.shared[0], [PREFILL])
    assert measured_dims(profile, twice, PAIR.shared[0], [PREFILL]) == {dim: 2 * ns for dim, ns in once.items()}


def test_an_axis_that_several_dims_make_up() -> None:
    run = Run("linear", (("k", 64),), "n", (("a", 1), ("b", 4)), rest=3)
    assert run.operation({"a": 10, "b": 5}, rows=7) == operation("linear", m=7, k=64, n=33)
