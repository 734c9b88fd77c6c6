"""The real measurer on a GPU that is made up of this CPU, and what goes wrong with it in the middle of a sweep."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gac.core.errors import ProfileError
from gac.forms.low_rank import low_rank
from gac.profiling.operators import runner_of
from gac.profiling.records import Header, Launch, Measurement, Point
from gac.profiling.sweeps.sweep import run_sweep
from gac.profiling.table import Profile
from gac.profiling.timing import measure
from gac.profiling.timing.operands import Pools
from gac.profiling.timing.sampling import Batch, Clocks, Timing, sample_until

POINTS = [Point(low_rank(4, 64, rank, 64)) for rank in range(8, 20)]
BAD = 11
KERNEL = Launch("gemm", (1, 1, 1), (32, 1, 1), 0)


class Watch:
    """Takes the place of the stopwatch: 1 us a launch, at a clock that a test can hold down."""

    stream = None

    def __init__(self, _l2_bytes: int, max_clock_mhz: int, _ranks: object) -> None:
        self.clock = self.most = max_clock_mhz

    def time(self, call_on: Callable[[int], Sequence[Callable[[], object]]], _bytes: int, _cache: str) -> Timing:
        for call in call_on(2):
            call()
        return sample_until(lambda n: Batch([1000.0] * n, self.clock), Clocks(self.most, self.most), lambda _: None)


class Gpu:
    """The made-up GPU; ``at_bad`` is what happens where rank 11 runs, and ``lost`` whether the device is then gone."""

    def __init__(self) -> None:
        self.at_bad: Callable[[Sequence[torch.Tensor]], object] = lambda _outputs: None
        self.kills = False
        self.lost = False
        self.free = 2**24

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    fake = Gpu()
    runner = runner_of("low_rank")
    run = runner.run

    def harmed(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Any:
        result = run(inputs, outputs)
        if any(BAD in tensor.shape for tensor in inputs):
            fake.lost = fake.kills
            fake.at_bad(result)
        return result

    monkeypatch.setattr(runner, "run", harmed)
    monkeypatch.setattr(measure, "Pools", lambda _device, limit: Pools("cpu", limit))
    monkeypatch.setattr(measure, "Stopwatch", Watch)
    memory = {"empty_cache": lambda: None, "mem_get_info": lambda: (fake.free, fake.free)}
    monkeypatch.setattr(measure, "_cuda", SimpleNamespace(**memory))
    monkeypatch.setattr("torch.cuda.synchronize", fake.synchronize)
    monkeypatch.setattr(measure.GpuMeasurer, "launches", lambda _self, points: [(KERNEL,)] * len(points))
    return fake


def swept(path: Path, header: Header, gpu: Gpu) -> dict[int, Measurement]:
    """The rows by rank after a run in a new process."""
    gpu.lost = False
    run_sweep(POINTS, path, measure.GpuMeasurer(header), header, progress=False)
    return {row.shape["r"]: row for row in Profile.load(path).measurements}


def check_only_bad_failed(rows: dict[int, Measurement], reason: str) -> None:
    assert {rank: len(row.passes) for rank, row in rows.items()} == {rank: 3 * (rank != BAD) for rank in range(8, 20)}
    assert rows[BAD].error is not None
    assert rows[BAD].error.startswith(reason)


def raising(failure: Exception) -> Any:
    return Mock(side_effect=failure)


@pytest.mark.parametrize(
    ("at_bad", "reason"),
    [
        (raising(torch.OutOfMemoryError("CUDA out of memory.")), "CUDA out of memory."),
        (raising(NotImplementedError("no kernel for this shape")), "no kernel for this shape"),
        (raising(RuntimeError("CUDA error:\tout of \x1b[31mluck\nmore words")), "CUDA error: out of  [31mluck"),
        (lambda outputs: [output.fill_(math.nan) for output in outputs], "wrong result: relative error "),
        (lambda outputs: [output.fill_(0.0) for output in outputs], "wrong result: relative error "),
    ],
)
def test_a_shape_that_fails_or_runs_wrong_is_marked_and_the_others_go_on(at_bad, reason, gpu, header, tmp_path) -> None:
    gpu.at_bad = at_bad
    check_only_bad_failed(swept(tmp_path / "gpu.jsonl", header, gpu), reason)


def test_a_driver_that_fails_ends_the_run_and_the_next_one_leaves_the_shape_out(gpu, header, tmp_path) -> None:
    gpu.kills, gpu.at_bad = True, raising(RuntimeError("CUDA error: unspecified launch failure"))
    with pytest.raises(ProfileError, match="the GPU failed at low_rank bf16 m=4 k=64 r=11 n=64: CUDA error: unspec"):
        swept(tmp_path / "gpu.jsonl", header, gpu)
    check_only_bad_failed(swept(tmp_path / "gpu.jsonl", header, gpu), "CUDA error: unspecified launch failure")


def test_a_shape_that_fails_in_a_later_pass_keeps_its_timings_and_is_tried_again(gpu, header, tmp_path) -> None:
    path = tmp_path / "gpu.jsonl"
    run_sweep(POINTS, path, measure.GpuMeasurer(header), header, passes=1, progress=False)
    gpu.at_bad = raising(torch.OutOfMemoryError("CUDA out of memory."))
    assert len(swept(path, header, gpu)[BAD].passes) == 1
    gpu.at_bad = lambda _outputs: None
    assert len(swept(path, header, gpu)[BAD].passes) == 3


def test_a_gpu_without_room_to_begin_with_is_named(gpu, header, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(measure, "Stopwatch", raising(torch.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(ProfileError, match="the GPU cannot be prepared: CUDA out of memory"):
        swept(tmp_path / "gpu.jsonl", header, gpu)
    assert not (tmp_path / "gpu.jsonl").exists()
