"""``gac profile`` and ``gac profiles``: what is asked for reaches the profiler, here without a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import answer, ranks, refused, run, write_profile

from gac.core.workloads import Workload
from gac.plan.engines import VLLM
from gac.profiling.folders import find_profile
from gac.profiling.records import Point
from gac.profiling.sweeps.coverage import fused_points, general_points, model_points
from gac.profiling.sweeps.profiler import Estimate
from gac_extensions.lab.studies import STUDIES
from tests.headers import make_header


class Profiler:
    """Takes the place of ``profile_gpu`` and ``estimate``; remembers what it was asked for."""

    def __init__(self, recorded: Path) -> None:
        self.recorded = recorded
        self.points: set[Point] = set()
        self.rest: tuple[Any, ...] = ()

    def profile_gpu(self, points: Sequence[Point], *rest: Any) -> Path:
        assert len(points) == len(set(points))
        self.points, self.rest = set(points), rest
        return self.recorded

    def estimate(self, points: Sequence[Point], *rest: Any, gpus: int = 1) -> Estimate:
        self.points, self.rest = set(points), rest
        return Estimate(self.recorded, len(points), 3 * len(points), 61.25, make_header())


@pytest.fixture
def profiler(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Profiler:
    fake = Profiler(recorded)
    monkeypatch.setattr("gac.profiling.timing.device.require_gpu", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    monkeypatch.setattr("gac.profiling.sweeps.profiler.profile_gpu", fake.profile_gpu)
    monkeypatch.setattr("gac.profiling.sweeps.profiler.estimate", fake.estimate)
    return fake


def test_without_arguments_the_gpu_is_measured_generally(profiler: Profiler) -> None:
    document = answer("profile")
    assert profiler.points == set(general_points("bf16", (8, 0)))
    assert profiler.rest == (None, 3, None, 1)
    assert (document["path"], document["shapes"]) == (str(profiler.recorded), 129)
    shown = " ".join(run("profile").stdout.split())
    assert "129 shapes of NVIDIA Test GPU, 0 failed; 100.0% converged" in shown
    assert "saved as" in shown


DECODE = [Workload.parse("decode:4@64")]


def of_model(*options: Any, **named: Any) -> tuple[Point, ...]:
    return (*model_points("smollm2", *options, **named), *fused_points("smollm2", *options, **named))


def test_an_engine_s_kernels_are_measured(profiler: Profiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gac.evaluation.engines.steps.profile_steps", lambda *_: None)
    assert run("profile", "--model", "smollm2", "--engine", "vllm").exit_code == 0
    assert profiler.points == {replace(point, operation=VLLM.operation(point.operation)) for point in of_model()}


@pytest.mark.parametrize(
    ("options", "points"),
    [
        ("--model smollm2", of_model()),
        ("--model smollm2 --workload decode:4@64 --dtype fp16", of_model(DECODE, "fp16")),
        ("--model smollm2 --tensor-parallel 3", of_model(gpus=3)),
        ("--model smollm2 --form head_dim", of_model(forms=("head_dim",))),
        ("--sweep general --dtype fp16", general_points("fp16", (8, 0))),
        ("--model smollm2 --scheme w4a16:64 --scheme fp8", of_model(schemes=("w4a16:64", "fp8"))),
        ("--scheme w8a16", general_points("bf16", (8, 0), ("w8a16",))),
    ],
)
def test_what_is_asked_for_is_measured(options: str, points: tuple[Point, ...], profiler: Profiler) -> None:
    assert run("profile", *options.split()).exit_code == 0
    assert profiler.points == set(points)


def test_sweeps_and_models_add_up(profiler: Profiler) -> None:
    words = "profile --sweep gemm-k --sweep gemv --model smollm2 --passes 2 --seconds 9 --gpus 4"
    assert run(*words.split(), "-o", profiler.recorded).exit_code == 0
    assert profiler.points == {*STUDIES.get("gemm-k").points(), *STUDIES.get("gemv").points(), *of_model()}
    assert profiler.rest == (profiler.recorded, 2, 9.0, 4)


def test_an_estimate_measures_nothing(profiler: Profiler) -> None:
    shapes = len(STUDIES.get("gemv").points())
    document = answer("profile", "--sweep", "gemv", "--estimate")
    path = str(profiler.recorded)
    assert document == {"path": path, "shapes": shapes, "timings": 3 * shapes, "seconds": 61.2}


def test_a_and_b_are_twice_the_passes(profiler: Profiler, tmp_path: Path) -> None:
    path = write_profile(tmp_path / "aa.jsonl", ranks(range(8, 17)), lambda point: point.operation.axes["r"])
    again = "".join(f'{{"record":"again","row":{row},"median_ns":{1e6 if row else 1e5}}}\n' for row in range(9))
    path.write_text(path.read_text() + again)
    profiler.recorded = path
    document = answer("profile", "--aa")
    assert profiler.rest == (None, 6, None, 1)
    assert (document["aa"]["dims"], document["aa"]["false_cliffs"], document["aa"]["fraction"]) == (9, 8, 8 / 9)
    assert "A/A: 8 false cliffs in 9 dims" in " ".join(run("profile", "--aa").stdout.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sweep gemm", "sweep 'gemm' is unknown; expected one of general, "),
        ("--dtype fp4", "dtype 'fp4'; expected one of bf16, fp16"),
        ("--sweep gemv --scheme w4a16", "schemes w4a16 with sweeps gemv, whose dtypes are fixed; expected a model"),
        ("--collectives", "collectives of 1 process on 1 host; expected several processes on one host"),
        ("--model smollm2 --tensor-parallel 2", "tensor_parallel=2 for a model with 3 key-value heads"),
    ],
)
def test_what_is_not_known_is_refused(options: str, message: str, profiler: Profiler) -> None:
    assert refused("profile", *options.split()).startswith(f"Error: {message}")
    assert profiler.points == set()


@pytest.mark.parametrize("command", ["profile --estimate", "study gemv"])
def test_without_a_gpu_the_shipped_profiles_are_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run(*command.split())
    assert (result.exit_code, result.stdout) == (1, "")
    assert "expected an NVIDIA GPU to measure. Use a profile that was measured elsewhere: " in result.stderr
    assert "nvidia-h100-80gb-hbm3" in result.stderr


def test_profiles_lists_shipped_saved_and_unreadable_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAC_HOME", str(tmp_path))
    shipped = [find_profile("nvidia-h100-80gb-hbm3")]
    monkeypatch.setattr("gac.profiling.folders.shipped_profiles", lambda: shipped)
    (tmp_path / "profiles").mkdir()
    write_profile(tmp_path / "profiles" / "mine.jsonl", ranks(), lambda point: point.operation.axes["r"])
    assert "mine saved NVIDIA Test GPU 129 1 2026-01-01" in " ".join(run("profiles").stdout.split())
    (tmp_path / "profiles" / "torn.jsonl").write_text("torn\n")
    entries = {entry["name"]: entry for entry in answer("profiles")["profiles"]}
    assert entries["nvidia-h100-80gb-hbm3"]["where"] == "shipped"
    assert entries["mine"]["where"] == "saved"
    assert (entries["mine"]["shapes"], entries["mine"]["operators"]) == (129, ["low_rank"])
    assert "torn.jsonl:1: no header with a schema_version" in entries["torn"]["problem"]
