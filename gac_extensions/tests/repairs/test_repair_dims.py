"""The padded dim of each strategy, and the latency of the GEMMs before and after."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from gac.core.errors import GacError, ProfileError
from gac.core.workloads import Workload
from gac.profiling.operators import operation
from gac.profiling.records import DeviceLostError, Header, Measurement, Point
from gac.profiling.table import Profile
from gac_extensions.repairs.contract import STRATEGIES, ShapeContract
from gac_extensions.repairs.dims import Run, SharedDim
from gac_extensions.repairs.run import decide
from gac_extensions.repairs.times import DTYPE, in_table, measured_dims, on_gpu, total_times
from tests.cli.commands import ranks, write_profile
from tests.headers import make_header

PREFILL = Workload.parse("prefill:1x1024")
PAIR = Run("low_rank", {"k": 4096, "n": 4096}, "r", {"q_proj": 1})
RANK = SharedDim("q_proj", 1023, (), (PAIR,))
DIMS = {"q_proj": 1023}, {"q_proj": 1024}
PROFILE, MINIMAL = STRATEGIES["profile"], STRATEGIES["minimal"]


@pytest.mark.parametrize(
    ("strategy", "padded"),
    [
        ("minimal", {1: 8, 107: 112, 120: 120, 655: 656, 1638: 1640, 2548: 2552}),
        ("optimal", {1: 16, 107: 112, 120: 128, 655: 656, 1638: 1648, 2548: 2560}),
        ("predefined", {1: 32, 97: 128, 107: 128, 128: 128, 129: 160, 257: 320, 655: 704, 1638: 1664, 2548: 2560}),
        # 107 to 128 would add 20 % and to 112 adds 5 %; 117 to 128 adds 9 %; every choice for 41 adds more than 10 %.
        ("tradeoff", {41: 41, 107: 112, 117: 128, 113: 120, 120: 120, 655: 672, 1638: 1664, 2548: 2560}),
    ],
)
def test_strategy(strategy: str, padded: dict[int, int]) -> None:
    contract = ShapeContract.named(strategy)
    assert {dim: contract.becomes(dim) for dim in padded} == padded
    for dim in range(1, 600):
        larger = contract.becomes(dim)
        assert larger >= dim
        assert contract.becomes(larger) == larger


@pytest.mark.parametrize(
    ("dim", "limit", "latency", "padded"),
    [
        (1023, None, {1000: 10, 1024: 300, 1030: 900, 1032: 310, 1088: 290, 1152: 350}, 1088),
        (1023, None, {1024: 10_050, 1032: 10_000, 1040: 10_200}, 1024),  # the smallest of the equally fast
        (1000, 0.05, {1000: 900, 1024: 300, 1088: 200}, 1024),
    ],
)
def test_fastest_measured_dim(dim: int, limit: float | None, latency: dict[int, int], padded: int) -> None:
    assert replace(PROFILE, most_overhead=limit).becomes(dim, latency=latency) == padded


def test_limits_and_custom_contracts() -> None:
    assert MINIMAL.becomes(61, most=62) == 61
    assert replace(MINIMAL, most_overhead=0.01).becomes(107) == 107
    contract = ShapeContract("mine", steps=(128, 64), dims=(64, 192), most_overhead=0.5)
    assert [contract.becomes(dim) for dim in (60, 65, 129, 193, 200, 250)] == [64, 65, 192, 256, 256, 256]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ShapeContract.named("minimum"), "strategy 'minimum' is unknown; .*Did you mean 'minimal'?"),
        (lambda: replace(MINIMAL, most_overhead=float("nan")), "a maximum overhead of nan"),
        (lambda: ShapeContract("mine", steps=(0,)), "expected a positive step at least"),
        (lambda: ShapeContract("mine", steps=(8,), dims=(64, 32)), "and dims that rise"),
    ],
)
def test_invalid_contracts(make: Callable[[], ShapeContract], words: str) -> None:
    with pytest.raises(GacError, match=words):
        make()


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    """Ranks from 960 to 1088; those that are no multiple of 8 are 2.5 or 5 times as slow."""
    return recorded(tmp_path, range(960, 1089))


def recorded(folder: Path, dims: Iterable[int]) -> Profile:
    return Profile.load(write_profile(folder / "recorded.jsonl", ranks(dims), lambda point: point.operation.axes["r"]))


def test_predicted_latency(profile: Profile) -> None:
    times = total_times("predicted", "a GPU", [PAIR, PAIR], DIMS, PREFILL, in_table(profile))
    assert (times.gemms, times.before_ns, times.after_ns) == (2, 2 * 151_150, 2 * 30_240)
    assert (times.before_unknown, times.after_unknown) == (0, 0)
    unknown = DIMS[0], {"q_proj": 2048}
    times = total_times("predicted", "a GPU", [PAIR], unknown, PREFILL, in_table(profile))
    assert (times.before_ns, times.after_ns, times.after_unknown) == (151_150, None, 1)


class Machine:
    """Stands in for a GPU: a launch takes the sum of its dims, in ns."""

    def __init__(self, header: Header) -> None:
        self.measured: list[Point] = []

    def measure(self, point: Point) -> Measurement:
        assert point not in self.measured
        self.measured.append(point)
        axes = point.operation.axes
        ns = sum(axes.values()) - 0.5
        row = Measurement(point.operation.operator, axes, DTYPE, "cold", ns, 1.0, 10, 1980, True)
        if axes["r"] == 1:
            raise DeviceLostError(row)
        return row


def test_measured_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gac.profiling.timing.device.fingerprint", make_header)
    monkeypatch.setattr("gac.profiling.timing.measure.GpuMeasurer", Machine)
    gpu, latency = on_gpu([PAIR, PAIR], DIMS, [PREFILL])
    times = total_times("measured", gpu, [PAIR, PAIR], DIMS, PREFILL, latency)
    assert (times.gpu, times.before_ns, times.after_ns) == ("NVIDIA Test GPU", 2 * 10_239, 2 * 10_240)
    with pytest.raises(ProfileError, match=r"the GPU failed: .*; expected a GPU that runs every shape"):
        on_gpu([PAIR], ({"q_proj": 1}, {"q_proj": 8}), [PREFILL])


def test_decisions(profile: Profile, tmp_path: Path) -> None:
    assert decide([RANK], PROFILE, profile, [PREFILL]) == {"q_proj": 1024}
    assert decide([RANK], PROFILE, recorded(tmp_path, [960, 1022, 1056, 1088]), [PREFILL]) == {"q_proj": 1056}
    heads = SharedDim("self_attn", 3, (), form="heads")
    assert all(decide([heads], contract, profile, [PREFILL]) == {"self_attn": 3} for contract in STRATEGIES.values())
    once = measured_dims(profile, RANK, [PREFILL])
    twice = measured_dims(profile, replace(RANK, runs=(PAIR, PAIR)), [PREFILL])
    assert twice == {dim: 2 * ns for dim, ns in once.items()}
    words = r"has measured no dim from 1023 on for q_proj \(low_rank m=1 k=4096 n=4096, r\).*gac profile --model"
    with pytest.raises(ProfileError, match=words):
        measured_dims(profile, RANK, [PREFILL, Workload.parse("decode:1@1024")])


def test_axis_of_several_dims() -> None:
    run = Run("linear", {"k": 64}, "n", {"a": 1, "b": 4}, rest=3)
    assert run.operation({"a": 10, "b": 5}, rows=7) == operation("linear", m=7, k=64, n=33)
