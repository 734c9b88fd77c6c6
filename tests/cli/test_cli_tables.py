"""``gac profile``, ``gac profiles``, ``gac cliffs`` and ``gac explain`` on a small recorded table, without a GPU."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gac.core.workloads import Workload
from gac.plan.engines import VLLM
from gac.profiling.folders import find_profile
from gac.profiling.records import Point
from gac.profiling.sweeps.coverage import fused_points, general_points, model_points
from gac.profiling.sweeps.profiler import Estimate
from gac_extensions.lab.studies import STUDIES
from tests.cli.commands import answer, ranks, refused, run, write_profile
from tests.headers import make_header


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A low-rank sweep along r, on a GPU like an H100."""
    return write_profile(tmp_path / "recorded.jsonl", ranks(), lambda point: point.operation.axes["r"])


# --- cliffs ---------------------------------------------------------------------------------------------------------


def test_the_table_names_each_sweep_its_period_its_causes_and_single_dims(recorded: Path) -> None:
    shown = " ".join(run("cliffs", recorded).stdout.split())
    assert "low_rank bf16 m=1024 k=4096 n=4096, r 129 112 " in shown
    assert "causes of the 112 collapsed dims: alignment tier 100.0%" in shown
    assert "low_rank bf16 m=1024 k=4096 n=4096, r 8 4.99* 2.50* 2.50* 1.00 0.99 -" in shown
    shown = " ".join(run("cliffs", recorded, "--dims", "1023:1024").stdout.split())
    assert "1023 151.2 0.1 5.00x 1024 alignment tier cutlass_75_tensorop" in shown
    assert "1024 30.2 0.0 nvjet_sm90" in shown


def test_the_document_has_each_collapsed_dim_and_each_edge_with_its_cause(recorded: Path) -> None:
    (sweep,) = answer("cliffs", recorded, "--dims", "1022:1024")["sweeps"]
    assert (sweep["operator"], sweep["axis"], sweep["period"], sweep["points"]) == ("low_rank", "r", 8, 129)
    odd = sweep["alignment"][0]
    assert (odd["step"], odd["against"], odd["dims"], odd["keeps_up"]) == (1, 8, 64, False)
    assert odd["low"] <= odd["slowdown"] <= odd["high"]
    rows = [(row["dim"], row["rescue"], row["cause"]["kind"]) for row in sweep["collapsed"]]
    assert rows == [(1022, 1024, "alignment tier"), (1023, 1024, "alignment tier")]
    assert [point["dim"] for point in sweep["measured"]] == [1022, 1023, 1024]
    assert sweep["measured"][2]["launches"][0]["grid"] == [132, 1, 1]
    choice = ("--operator", "linear_rowwise", "--axis", "n", "--shape", "m=1024,k=4096")
    (sweep,) = answer("cliffs", "nvidia-h100-80gb-hbm3", *choice)["sweeps"]
    (step,) = (step for step in sweep["staircase"] if step["sweet_spot"] == 2048)
    assert (step["edge"], step["cause"]["kind"]) == (2112, "wave")
    assert "136 tiles in 2 waves, " in step["cause"]["evidence"]


def test_sweeps_are_chosen_by_dtype(tmp_path: Path) -> None:
    points = [*ranks(), *(replace(point, dtype="w4a16") for point in ranks())]
    path = write_profile(tmp_path / "both.jsonl", points, lambda point: point.operation.axes["r"])
    assert [sweep["dtype"] for sweep in answer("cliffs", path)["sweeps"]] == ["bf16", "w4a16"]
    chosen = ("--operator", "low_rank", "--dtype", "w4a16")
    (sweep,) = answer("cliffs", path, *chosen)["sweeps"]
    assert (sweep["dtype"], sweep["period"]) == ("w4a16", 8)
    kinds = {row["rescue"] % 32 == 0: row["cause"]["kind"] for row in sweep["collapsed"]}
    assert kinds == {True: "no kernel", False: "alignment tier"}  # kernels of w4a16 read multiples of 32
    assert run("plot", "latency", path, *chosen, "-o", tmp_path / "x.png").exit_code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--shape m=3", "any operator m=3"),
        ("--axis k --operator linear", "linear along k"),
        ("--dtype w4a16", "any operator w4a16"),
        ("--operator low_rank --dims 1:9", "low_rank dims 1:9"),
    ],
)
def test_a_choice_that_matches_nothing(options: str, words: str, recorded: Path) -> None:
    message = refused("cliffs", recorded, *options.split())
    assert f"Error: no sweep of recorded is of {words}; expected one of its 1" in message
    assert ("or measure it with gac profile --scheme." in message) == ("w4a16" in words)


def test_figures_of_the_chosen_sweeps_and_of_all(recorded: Path, tmp_path: Path) -> None:
    figure, shape = tmp_path / "cliffs.svg", "m = 1024, k=4096,n=4096"
    assert run("cliffs", recorded, "--shape", shape, "--plot", figure).stderr == f"drawn in {figure}\n"
    assert run("cliffs", recorded, "--plot", figure).exit_code == 0
    assert "NVIDIA Test GPU, PyTorch 2.11.0, CUDA 13.0" in figure.read_text()
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".part"] == []


def test_a_profile_that_is_unknown_or_has_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = write_profile(tmp_path / "short.jsonl", ranks(range(8, 64, 8)), lambda point: 8)
    assert "profile short has no sweep; expected at least 8 dims along one axis" in refused("cliffs", short)
    monkeypatch.setattr("gac.profiling.folders.shipped_profiles", lambda: (Path("nvidia-h100-80gb-hbm3.jsonl"),))
    monkeypatch.setenv("GAC_HOME", str(tmp_path))
    result = run("cliffs", "nvidia-h100", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"] == {
        "given": "profile 'nvidia-h100' is neither a file nor a known name",
        "expected": "a path, or one of nvidia-h100-80gb-hbm3",
        "remedy": "Did you mean 'nvidia-h100-80gb-hbm3'? A GPU without a table is measured with gac profile, on that "
        "GPU.",
    }


# --- explain --------------------------------------------------------------------------------------------------------


def test_without_a_profile_the_rules_and_published_costs_are_listed() -> None:
    document = answer("explain", "low_rank", 1023)
    assert (document["operator"], document["axis"], document["gpu"]) == ("low_rank", "r", None)
    tier = next(rule for rule in document["rules"] if rule["rule"] == "cuBLAS alignment tier")
    assert (tier["holds"], tier["below"], tier["above"]) == (False, 1016, 1024)
    assert tier["cost"]["basis"] == "published"
    assert tier["sources"][0]["url"].startswith("https://docs.nvidia.com/")
    words = ("low_rank", 4095, "--axis", "n", "--shape", "m=1024,k=4096,r=1024", "--dtype", "fp16")
    document = answer("explain", *words)
    assert (document["axis"], document["dtype"], document["latency_ns"]) == ("n", "fp16", None)


def test_with_a_profile_the_cost_and_the_cause_are_measured(recorded: Path) -> None:
    document = answer("explain", "low_rank", 1023, "--profile", recorded)
    assert document["fixed"] == {"m": 1024, "k": 4096, "n": 4096}
    assert (document["collapse"]["rescue"], document["collapse"]["cause"]["kind"]) == (1024, "alignment tier")
    assert [kernel["family"] for kernel in document["ran"]] == ["cutlass", "cutlass"]
    shown = " ".join(run("explain", "low_rank", 1023, "--profile", recorded).stdout.split())
    assert shown.startswith("low_rank r=1023 on NVIDIA Test GPU takes 151.2 us, 5.00x as long as 1024")
    assert "recorded at r=1023, m=1024 k=4096 n=4096" in shown
    assert "BROKEN cuBLAS alignment tier" in shown
    assert "cost of cuBLAS alignment tier, " in shown
    assert "https://docs.nvidia.com/cuda/cublas/index.html" in shown


def test_requirements_of_a_scheme_and_an_unknown_operator() -> None:
    rules = answer("explain", "linear", 1000, "--axis", "n", "--dtype", "fp8_dynamic")["rules"]
    broken = next(rule for rule in rules if rule["rule"] == "scheme operator")
    assert (broken["holds"], broken["below"], broken["above"]) == (False, 992, 1008)
    shown = " ".join(run("explain", "linear", 4008, "--dtype", "w4a16").stdout.split())
    assert "BROKEN scheme kernel" in shown
    assert "BROKEN scheme groups" in shown
    assert refused("explain", "low_rnk", 8).endswith("Did you mean 'low_rank'?\n")


# --- profile --------------------------------------------------------------------------------------------------------


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
    assert profiler.points == {
        replace(point, operation=VLLM.operation(point.operation, point.dtype)) for point in of_model()
    }


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


def test_sweeps_and_models_add_up_and_an_estimate_measures_nothing(profiler: Profiler) -> None:
    words = "profile --sweep gemm-k --sweep gemv --model smollm2 --passes 2 --seconds 9 --gpus 4"
    assert run(*words.split(), "-o", profiler.recorded).exit_code == 0
    assert profiler.points == {*STUDIES.get("gemm-k").points(), *STUDIES.get("gemv").points(), *of_model()}
    assert profiler.rest == (profiler.recorded, 2, 9.0, 4)
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


def test_profiles_with_a_name_lists_what_a_table_has(tmp_path: Path) -> None:
    document = answer("profiles", "nvidia-h200-vllm")
    assert (document["gpu"], document["date"], document["gac_version"]) == ("NVIDIA H200", "2026-11-30", "0.1.0")
    rows = {(row["model"], row["scheme"]): row["rows"] for row in document["models"]}
    assert {1, 16, 64, 8192} <= {*rows["llama-3-8b", "bf16"]}
    assert {1, 16, 64} <= {*rows["llama-3-8b", "w4a16"]} & {*rows["llama-3-8b", "fp8"]}
    steps = {(row["model"], row["scheme"]): row["workloads"] for row in document["steps"]}
    assert "decode:16@1024" in steps["llama-3-8b", "bf16"]
    assert ("qwen3-8b", "bf16") in steps
    shown = " ".join(run("profiles", "nvidia-h200-vllm").stdout.split())
    assert "llama-3-8b w4a16 1, 16, 64, 1,024, 8,192 " in shown
    assert "smollm2 bf16 decode:1@1024 decode:16@1024 decode:64@1024 for plans with --engine vllm" in shown
    assert "GAC 0.1.0, driver 580.159.04, CUDA 13.0" in shown
    path = write_profile(tmp_path / "mine.jsonl", ranks(), lambda point: point.operation.axes["r"])
    document = answer("profiles", path)
    assert (document["name"], document["shapes"], document["models"], document["steps"]) == ("mine", 129, [], [])
    assert "profile 'nowhere' is neither a file nor a known name" in refused("profiles", "nowhere")
