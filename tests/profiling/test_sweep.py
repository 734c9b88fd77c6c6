import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from gac.errors import ModelError, ProfileError
from gac.forms import Operation, Weight, linear, low_rank
from gac.profiling.journal import Journal
from gac.profiling.sweep import dims_of, operations_for, operations_of_models, profile_gpu, run_sweep, summary
from gac.profiling.table import Measurement, Profile, alignment_class
from gac.sites import Site

OPERATIONS = [low_rank(1, 64, rank, 64) for rank in range(1, 31)]


class FakeMeasurer:
    """Says 100 ns a unit of rank; fails, or is interrupted, at the ranks it is told."""

    dtype = "bf16"

    def __init__(self, fails: int = -1, interrupted_after: int = 1000) -> None:
        self.fails = fails
        self.left = interrupted_after
        self.measured: list[Operation] = []

    def measure(self, operation: Operation) -> Measurement:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.measured.append(operation)
        rank = operation.axes["r"]
        if rank == self.fails:
            return Measurement(
                "low_rank", operation.axes, "bf16", "cold", None, None, 0, None, False, error="out of memory"
            )
        return Measurement("low_rank", operation.axes, "bf16", "cold", 100.0 * rank, 1.0, 10, 1980, True)

    def kernels(self, operations) -> list[tuple[str, ...]]:
        return [("gemm_odd",) if operation.axes["r"] % 2 else ("gemm", "gemm") for operation in operations]


# --- which shapes ---


def test_small_axes_have_every_multiple_of_8() -> None:
    dims = dims_of(417)
    assert {dim for dim in dims if dim % 8 == 0} == set(range(8, 418, 8))
    assert set(range(248, 265)) <= set(dims)


def test_every_axis_has_an_unbroken_stretch_and_dims_of_every_class() -> None:
    for largest, stretch in ((819, range(496, 529)), (2047, range(1008, 1041)), (14335, range(1008, 1041))):
        dims = dims_of(largest)
        assert set(stretch) <= set(dims)
        assert max(dims) <= largest
        assert {dim & -dim for dim in dims} >= {1, 2, 4, 8, 16, 32, 64}


def test_neighbours_of_a_class_are_near_enough_to_interpolate_between() -> None:
    import numpy as np

    for largest in (287, 2047, 3185, 14335, 28671):
        dims = np.array(dims_of(largest))
        for step in (1, 2, 4, 8, 16, 32, 64):
            ours = dims[alignment_class(dims) == step]
            assert (np.diff(ours) <= np.maximum(64, ours[:-1] / 4)).all(), (largest, step)


def test_an_axis_too_short_to_measure_is_left_out() -> None:
    assert dims_of(7) == ()


def test_operations_are_distinct_and_shared_between_equal_weights() -> None:
    block = [Weight(f"layers.{layer}.{kind}", 64, 64) for layer in range(3) for kind in ("q", "o")]
    sites = [Site(weight.name, 0, "q_proj", (weight,)) for weight in block]
    operations = operations_for(sites, rows=(1, 16))
    assert len(operations) == len(set(operations)) == 2 * (1 + len(dims_of(31)))
    assert linear(16, 64, 64) in operations
    assert low_rank(1, 64, 24, 64) in operations


def test_only_weights_with_neurons_are_narrowed() -> None:
    up, down = Weight("up", 128, 32, neurons="out"), Weight("down", 32, 128, neurons="in")
    operations = operations_for([Site("mlp", 0, "mlp", (up, down))], rows=(1,))
    assert linear(1, 32, 64) in operations
    assert linear(1, 64, 32) in operations
    assert operations_for([Site("q", 0, "q", (Weight("q", 128, 32),))], rows=(1,)).count(linear(1, 32, 64)) == 0


def test_the_shipped_models_are_covered_by_about_twelve_thousand_shapes() -> None:
    operations = operations_of_models(["smollm2", "llama-3-8b"])
    assert 11_000 < len(operations) < 14_000
    assert {low_rank(1024, 4096, rank, 4096) for rank in range(1008, 1041)} <= set(operations)


def test_an_unknown_model_is_named_with_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        operations_of_models(["llama-3-8B"])
    assert str(caught.value) == (
        "no shapes are known for model 'llama-3-8B'; expected one of smollm2, llama-3-8b, or a transformers config. "
        "Did you mean 'llama-3-8b'?"
    )


# --- measuring them ---


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "gpu.jsonl"


def test_a_sweep_writes_every_shape_with_its_kernels(path, header) -> None:
    report = run_sweep(OPERATIONS, path, FakeMeasurer(fails=7), header, passes=1, progress=False)
    profile = Profile.load(path)
    rows = {row.operation: row for row in profile.measurements}
    assert set(rows) == set(OPERATIONS)
    assert rows[low_rank(1, 64, 3, 64)].kernels == ("gemm_odd",)
    assert rows[low_rank(1, 64, 4, 64)].kernels == ("gemm", "gemm")
    assert [row.shape["r"] for row in profile.failed] == [7]
    assert (report.timed, report.remaining, report.failed) == (30, 0, 1)


def test_every_shape_that_runs_is_timed_once_a_pass(path, header) -> None:
    measurer = FakeMeasurer(fails=7)
    run_sweep(OPERATIONS, path, measurer, header, passes=3, progress=False)
    rows = Profile.load(path).measurements
    assert {row.shape["r"]: len(row.passes) for row in rows} == {rank: 3 * (rank != 7) for rank in range(1, 31)}
    assert len(measurer.measured) == 29 * 3 + 1


def test_more_passes_can_be_added_later(path, header) -> None:
    run_sweep(OPERATIONS, path, FakeMeasurer(), header, passes=1, progress=False)
    assert run_sweep(OPERATIONS, path, FakeMeasurer(), header, passes=2, progress=False).timed == 30
    assert {len(row.passes) for row in Profile.load(path).measurements} == {2}


def test_the_order_is_another_in_each_pass_and_the_same_every_time(path, header, tmp_path) -> None:
    first, second = FakeMeasurer(), FakeMeasurer()
    run_sweep(OPERATIONS, path, first, header, passes=2, progress=False)
    run_sweep(OPERATIONS, tmp_path / "other.jsonl", second, header, passes=2, progress=False)
    assert first.measured == second.measured
    assert OPERATIONS != first.measured[:30] != first.measured[30:]
    assert set(first.measured[:30]) == set(first.measured[30:]) == set(OPERATIONS)


def test_a_sweep_resumes_where_an_interrupt_stopped_it(path, header) -> None:
    for interrupted_after in (12, 30):
        with pytest.raises(KeyboardInterrupt):
            run_sweep(OPERATIONS, path, FakeMeasurer(interrupted_after=interrupted_after), header, progress=False)
    assert sorted(len(row.passes) for row in Profile.load(path).measurements) == [1] * 18 + [2] * 12
    report = run_sweep(OPERATIONS, path, FakeMeasurer(), header, progress=False)
    assert report.timed == 18
    assert {len(row.passes) for row in Profile.load(path).measurements} == {2}


def test_a_complete_file_is_left_as_it_is(path, header) -> None:
    run_sweep(OPERATIONS, path, FakeMeasurer(), header, progress=False)
    before = path.read_bytes()
    again = FakeMeasurer()
    assert run_sweep(OPERATIONS, path, again, header, progress=False).timed == 0
    assert again.measured == []
    assert path.read_bytes() == before


def test_a_last_line_cut_short_is_cut_off_before_going_on(path, header) -> None:
    run_sweep(OPERATIONS[:10], path, FakeMeasurer(), header, progress=False)
    path.write_bytes(path.read_bytes() + b'{"record":"row","oper')
    run_sweep(OPERATIONS[:20], path, FakeMeasurer(), header, progress=False)
    assert {row.operation for row in Profile.load(path).measurements} == set(OPERATIONS[:20])


def test_a_file_with_half_a_header_is_begun_again(path, header) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"record":"hea')
    run_sweep(OPERATIONS, path, FakeMeasurer(), header, progress=False)
    assert len(Profile.load(path).measurements) == 30


def test_a_time_limit_stops_cleanly(path, header) -> None:
    report = run_sweep(OPERATIONS, path, FakeMeasurer(), header, seconds=0, progress=False)
    assert (report.timed, report.remaining) == (0, 60)
    assert Profile.load(path).measurements == ()


def test_a_file_of_another_machine_is_refused_and_left_alone(path, header) -> None:
    run_sweep(OPERATIONS[:3], path, FakeMeasurer(), header, progress=False)
    before = path.read_bytes()
    other = dataclasses.replace(header, gpu="NVIDIA A100", driver="570.0", date="2027-01-01")
    with pytest.raises(ProfileError) as caught:
        run_sweep(OPERATIONS, path, FakeMeasurer(), other, progress=False)
    assert str(caught.value) == (
        f"profile {path} has gpu 'NVIDIA Test GPU' where this machine has 'NVIDIA A100', driver '580.1' where this "
        "machine has '570.0'; expected a file begun on this machine with this software. Write to another file."
    )
    assert path.read_bytes() == before


def test_a_malformed_file_is_refused_and_left_alone(path, header) -> None:
    path.parent.mkdir()
    path.write_text("not a profile\n")
    with pytest.raises(ProfileError, match=r"gpu\.jsonl:1: no header"):
        run_sweep(OPERATIONS, path, FakeMeasurer(), header, progress=False)
    assert path.read_text() == "not a profile\n"


def test_one_file_has_one_writer(path, header) -> None:
    with Journal(path, header), pytest.raises(ProfileError, match=r"gpu\.jsonl is being written by another process"):
        run_sweep(OPERATIONS, path, FakeMeasurer(), header, progress=False)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path, header) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        run_sweep(OPERATIONS, tmp_path / "file" / "x.jsonl", FakeMeasurer(), header, progress=False)


# --- the whole job ---


def test_without_a_gpu_the_shipped_profiles_are_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        ProfileError, match=r"no CUDA device is visible to PyTorch .*; expected an NVIDIA GPU to measure\."
    ):
        profile_gpu(["smollm2"], path=tmp_path / "x.jsonl")
    assert not (tmp_path / "x.jsonl").exists()


def test_a_wrong_dtype_and_wrong_rows_are_named() -> None:
    with pytest.raises(ProfileError, match=r"dtype 'int3'; expected one of bf16, fp16\. Correct the name\."):
        profile_gpu(["smollm2"], dtype="int3")
    with pytest.raises(ProfileError, match=r"rows \[0\]; expected at least one positive number of rows"):
        profile_gpu(["smollm2"], rows=[0])
    with pytest.raises(ProfileError, match=r"0 passes; expected at least 1\. Use 2, the default\."):
        profile_gpu(["smollm2"], passes=0)


def test_a_summary_says_how_far_a_profile_can_be_trusted(path, header) -> None:
    run_sweep(OPERATIONS, path, FakeMeasurer(fails=7), header, progress=False)
    assert summary(Profile.load(path)) == (
        "30 shapes of NVIDIA Test GPU, 1 failed; 100.0% converged, passes within 0.0% for 95 %, drift +0.00%"
    )


def test_planning_a_sweep_and_reading_a_profile_load_no_torch() -> None:
    code = "import gac.profiling.sweep, gac.profiling.cliffs, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
