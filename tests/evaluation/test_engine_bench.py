"""Models in engines, with a fake engine in processes of their own, and the worker's use of a fake vLLM."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gac import plots
from gac.core.errors import CheckpointError, GacError
from gac.core.workloads import Workload
from gac.evaluation.engines import steps, vllm_engine
from gac.evaluation.engines.bench import bench_engine, parsed_options
from gac.evaluation.engines.process import EngineError, worker_command
from gac.evaluation.engines.records import EngineBench
from gac.evaluation.engines.workloads import EngineWorkload, default_workloads
from gac.models.families import family_of
from gac.models.shapes import SHAPES
from gac.plan.engines import steps_of
from gac.plan.plan import Plan
from gac.profiling.table import Profile
from gac.runtime.header import replace_weights
from gac.runtime.modules import LowRankLinear
from gac.schemes import scheme_named
from tests.cli.commands import run
from tests.headers import make_header
from tests.models.small import EXPERT_NEURONS, EXPERTS, small_config, small_model
from tests.serving.engine import shorter_values

RUNS = ("decode:2@8", "throughput:4x16")
FAKE = Path(__file__).with_name("fake_engine.py")
ROOT = FAKE.parents[2]

Pair = Callable[..., list[str]]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that runs the fake engine, whatever it is told to."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {FAKE} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Directories of two models, which behave as they are told."""

    def make(dense: dict[str, Any], small: dict[str, Any]) -> list[str]:
        for name, behaviour in (("dense", dense), ("small", small)):
            small_config("llama").save_pretrained(tmp_path / name)
            (tmp_path / name / "fake.json").write_text(json.dumps({"ms": [1.0], **behaviour}))
        return [str(tmp_path / name) for name in ("dense", "small")]

    return make


def test_steps_of_dense_models_join_a_table(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "fingerprint", make_header)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shapes, workload = SHAPES["smollm2"], Workload.parse("decode:1@64")
    path = tmp_path / "table.jsonl"
    steps.profile_steps({"smollm2": shapes}, [workload], path, python=python)
    table = Profile.load(path)
    assert [table.point(step, "bf16") for step in steps_of(shapes, workload)] == [1_536e6, 768e6, 384e6, 768e6 + 210e6]
    assert [call for _, call, *_ in calls(tmp_path)] == 4 * ["open", "measure", "measure", "measure"]
    steps.profile_steps({"smollm2": shapes}, [workload], path, python="not needed")
    steps.profile_steps({"smollm2": shapes}, [workload], path, python=python, schemes=("bf16", "w4a16", "fp8"))
    assert [call for _, call, *_ in calls(tmp_path)] == 6 * ["open", "measure", "measure", "measure"]
    served = steps_of(shapes, workload)[1]
    table = Profile.load(path)
    assert table.point(served, "bf16") == 768e6
    assert table.point(served, "w4a16") == table.point(served, "fp8_dynamic") == 768e6 + 210e6


def test_the_config_of_a_scheme_builds_a_model_in_it() -> None:
    dense = small_config("llama")
    modules = steps.stored_modules(dense, scheme_named("w4a16:32"))
    assert modules.keys() == {weight.name for site in family_of(dense).sites(dense) for weight in site.weights}
    query = modules["model.layers.0.self_attn.q_proj"]
    assert (query["form"], query["dim"], query["scheme"], query["storage"]) == (
        "dense",
        64,
        "w4a16:32",
        "PackedIntegers",
    )


def test_the_config_of_a_scheme_has_experts_where_vllm_runs_them_so() -> None:
    dense = small_config("mixtral")
    modules = steps.stored_modules(dense, scheme_named("fp8"))
    kinds = {name.rpartition(".")[2]: module["module"] for name, module in modules.items()}
    assert kinds == dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "Linear") | {"experts": "Experts"}
    stack = modules["model.layers.0.mlp.experts"]
    assert (stack["sizes"], stack["storage"]) == ({"experts": EXPERTS, "width": EXPERT_NEURONS}, "Floats8")
    assert not any(name.endswith("experts") for name in steps.stored_modules(dense, scheme_named("w4a16:32")))


def test_the_config_of_pairs_builds_a_model_of_pairs() -> None:
    dense = small_config("llama")
    values = steps.config_of(dense, served=True, modules=steps.paired_modules(dense))
    assert values["architectures"] == ["GacLlamaForCausalLM"]
    assert values["gac"]["modules"]["model.layers.0.self_attn.q_proj"] == {
        "form": "low_rank",
        "dim": 16,
        "module": "LowRankLinear",
        "sizes": {"in_features": 64, "out_features": 128, "rank": 16},
    }
    model = small_model(dense)
    replace_weights(model, SimpleNamespace(gac=values["gac"]))
    pairs = {name for name, module in model.named_modules() if isinstance(module, LowRankLinear)}
    assert pairs == {weight.name for site in family_of(dense).sites(dense) for weight in site.weights}


def calls(folder: Path) -> list[tuple[str, str, dict[str, Any], int]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_models_are_measured_in_turns(pair: Pair, python: Path, tmp_path: Path) -> None:
    bench = bench_engine(pair({}, {}), workloads=RUNS, turns=2, options=["dtype=float32"], python=python)
    opened = {"max_length": 73, "sequences": 4, "share": 0.45, "options": {"dtype": "float32"}}
    done = calls(tmp_path)
    assert [call[:3] for call in done[:2]] == [[name, "open", opened] for name in ("dense", "small")]
    once = [(name, run) for run in RUNS for name in ("dense", "small")]
    assert [(name, arguments["workload"]) for name, _, arguments, _ in done[2:]] == once * 3
    assert (bench.in_turns, bench.memory_share, bench.turns) == (True, 0.45, 2)
    assert not any(is_alive(process) for *_, process in done)


def test_medians_ratios_and_rates(pair: Pair, python: Path) -> None:
    names = pair(
        {"ms": [90.0, 2.0, 4.0, 3.0], "graph_ms": [9.0, 1.0, 3.0, 2.0]},
        {"ms": [90.0, 1.0, 4.0, 2.0], "graph_ms": [9.0, 1.0, 1.0, 1.0]},
    )
    bench = bench_engine(names, workloads=["decode:2@8"], turns=3, python=python)
    (dense,), (small,) = (model.timings for model in bench.models)
    assert (dense.ms, dense.graph_ms, dense.tokens_per_second, dense.ratio) == (3.0, 2.0, 2000 / 3, None)
    assert (small.ms_samples, small.ms, small.graph_ms) == ((1.0, 4.0, 2.0), 2.0, 1.0)
    assert (small.ratio, small.ratio_samples, small.graph_ratio) == (1.5, (2.0, 1.0, 1.5), 2.0)


@pytest.mark.slow
def test_models_that_do_not_fit_take_turns(pair: Pair, python: Path, tmp_path: Path) -> None:
    bench = bench_engine(pair({}, {"share": 0.6}), workloads=RUNS, turns=1, python=python)
    assert (bench.in_turns, bench.memory_share) == (False, 0.9)
    assert [name for name, *_ in calls(tmp_path)] == ["dense", "small", *["dense"] * 5, *["small"] * 5]
    assert "one model after the other; each with 90% of the GPU's memory" in bench.description


@pytest.mark.slow
def test_a_small_cache_is_a_lack_of_memory(pair: Pair, python: Path, tmp_path: Path) -> None:
    names = pair({"tokens": 145}, {"tokens": 146})
    with pytest.raises(GacError, match="dense in vLLM: its KV cache holds 145 tokens, and decode:2@8 needs 146"):
        bench_engine(names, workloads=RUNS, turns=1, python=python)
    assert [(name, call) for name, call, *_ in calls(tmp_path)] == [("dense", "open")] * 2
    assert bench_engine(names[1:], workloads=RUNS, turns=1, python=python).models[0].kv_cache_tokens == 146


@pytest.mark.parametrize(
    ("behaviour", "messages"),
    [
        ({"fails": "open"}, ["a weight is ValueLinear", "vllm serve ", "Last lines:\n  an engine's line"]),
        ({"fails": "measure"}, ["small in vLLM: RuntimeError", "expected a model and options that this engine runs"]),
        ({"ends": "open"}, ["small in vLLM: the process ended with status 3", "  Killed by something"]),
        ({"ends": "measure"}, ["small in vLLM: the process ended with status 3"]),
        ({"share": 1}, ["No available memory for the cache blocks; expected room", "Name smaller workloads"]),
        ({"ms": [0.0]}, ["decode:2@8 took 0 ms by the difference of two runs; expected a positive time"]),
    ],
)
def test_what_fails_is_told(behaviour: Any, messages: list[str], pair: Pair, python: Path, tmp_path: Path) -> None:
    with pytest.raises(GacError) as failure:
        bench_engine(pair({}, behaviour), workloads=RUNS, turns=1, python=python)
    assert [message for message in messages if message not in str(failure.value)] == []
    assert not any(is_alive(process) for *_, process in calls(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_environment_without_vllm_is_named(pair: Pair) -> None:
    with pytest.raises(GacError, match=r"No module named 'vllm'; expected vLLM in .*--engine-python"):
        bench_engine(pair({}, {}), workloads=RUNS)


def test_an_environment_without_torch_or_python_is_named(pair: Pair, tmp_path: Path) -> None:
    failure = EngineError("small", "ModuleNotFoundError: No module named 'torch'", [], "/usr/bin/python3")
    assert failure.expected == "vLLM in the environment of /usr/bin/python3"
    with pytest.raises(GacError, match="none cannot be started: No such file or directory; expected the Python of"):
        bench_engine(pair({}, {}), workloads=RUNS, python=tmp_path / "none")


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_gac(sent: signal.Signals, pair: Pair, python: Path, tmp_path: Path) -> None:
    small = pair({}, {"sleeps": "measure"})[1]
    words = ["bench", small, "--engine", "vllm", "--engine-python", str(python), "--workload", "decode:2@8"]
    # Shells ignore SIGINT in what they run in the background.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import gac.__main__"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        wait_for(lambda: (tmp_path / "calls.jsonl").exists() and len(calls(tmp_path)) == 2)
        process.send_signal(sent)
        said, _ = process.communicate()
    wait_for(lambda: not is_alive(calls(tmp_path)[0][-1]))
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert "Interrupted. Nothing was written" in said


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("a minute is over")


# --- what is refused before an engine starts ------------------------------------------------------------------------


def test_models_that_cannot_be_timed_are_refused(pair: Pair, tmp_path: Path) -> None:
    names = pair({}, {})
    for models, workloads, problem in (
        (names, ["decode:1@4", "decode:64@1024"], "dense' of 512 positions, for .* with sequences of 1,089 tokens"),
        (["smollm2"], RUNS, "model 'smollm2', which vLLM cannot open; expected a directory"),
        ([], RUNS, "0 models; expected 1 to 6"),
        ([names[0], names[0]], RUNS, "expected each once"),
        (names, ["decode:1@4"] * 2, "workloads decode:1@4, decode:1@4; expected each once"),
    ):
        with pytest.raises(GacError, match=problem):
            bench_engine(models, workloads=workloads)


def test_a_plan_that_the_engine_does_not_run_is_refused(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    shorter_values(make_plan).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_proj has form head_dim, which vLLM does not"):
        bench_engine([str(tmp_path)], python=tmp_path / "none")


def test_options_of_the_engine_are_json_or_words() -> None:
    parsed = parsed_options(["dtype=float32", "enforce_eager=true", 'compilation_config={"mode": 0}', "seed=3"])
    assert parsed == {"dtype": "float32", "enforce_eager": True, "compilation_config": {"mode": 0}, "seed": 3}
    for option, problem in (
        ("dtype", "expected NAME=VALUE, as in dtype=float32"),
        ("a-b=1", "expected NAME=VALUE, as in dtype=float32"),
        ("max_model_len=3", "whose name GAC sets"),
        ("x={", "expected a word, or JSON"),
    ):
        with pytest.raises(GacError, match=problem):
            parsed_options([option])
    with pytest.raises(GacError, match="whose name is there twice"):
        parsed_options(["seed=1", "seed=2"])


def test_workloads() -> None:
    defaults = [str(workload) for workload in default_workloads(1024)]
    assert defaults == [
        *("prefill:1x1024", "prefill:8x1024", "decode:1@1024", "decode:16@1024", "decode:64@1024"),
        "throughput:256x1024",
    ]
    assert [str(EngineWorkload.parse(text)) for text in defaults] == defaults
    decode, many = EngineWorkload.parse("decode:2@8"), EngineWorkload.parse("throughput:100x64")
    assert (decode.lengths, decode.longest, decode.cached_tokens) == ([(8, 65), (8, 65)], 73, 146)
    assert decode.tokens_per_second(10) == (200, None)
    assert EngineWorkload.parse("prefill:2x8").tokens_per_second(10) == (1600, None)
    prompts, answers = zip(*many.lengths, strict=True)
    assert (min(prompts), max(prompts), min(answers), max(answers)) == (8, 64, 4, 16)
    assert many.tokens_per_second(1000) == (sum(answers), sum(answers) + sum(prompts))
    for text in ("prefill:1@8", "throughput:0x8", "decode:16"):
        with pytest.raises(GacError, match="expected prefill:BxS, decode:B@C or throughput:RxS"):
            EngineWorkload.parse(text)
    with pytest.raises(GacError, match="of 5,000 sequences; expected at most 4,096"):
        EngineWorkload.parse("throughput:5000x8")


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_writes_and_draws(pair: Pair, python: Path, tmp_path: Path) -> None:
    dense, small = pair({"ms": [35.1], "graph_ms": [3.5]}, {"ms": [30.0], "graph_ms": [2.5]})
    written, figure = tmp_path / "bench.json", tmp_path / "bench.svg"
    words = ("bench", small, "--against", dense, "--engine", "vllm", "--engine-python", python, "--turns", 1)
    runs = [word for text in RUNS for word in ("--workload", text)]
    result = run(*words, *runs, "-o", written, "--plot", figure)
    assert result.exit_code == 0, result.output
    assert "2 models in vLLM: 2 workloads, 1 turn and a warm-up; 440 tokens each" in result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["decode:2@8", "35.100", "30.000", "1.17x", "1.17-1.17", "57.0", "66.7"] in lines
    assert ["decode:2@8", "3.500", "2.500", "1.40x"] in lines
    assert "vLLM 0.26.0, PyTorch 2.11.0, GAC 0.1.0, CUDA 13.0; A GPU\n1 run a workload in turns; " in result.stdout
    bench = EngineBench.load(written)
    assert [model.name for model in bench.models] == [dense, small]
    assert json.loads(written.read_text())["models"][1]["timings"][0]["ratio"] == pytest.approx(1.17)
    drawn = figure.read_text()
    assert "1.17x, 30.00 ms, 66.7 tokens/s" in drawn
    assert "CUDA graph of a step alone" in drawn
    again = run("plot", "speeds", written, "-o", tmp_path / "again.svg", "--title", "Again")
    assert again.exit_code == 0, again.output
    assert "1.17x, 30.00 ms" in (tmp_path / "again.svg").read_text()


def test_a_bench_of_one_model_has_no_ratio_and_is_read_back(pair: Pair, python: Path, tmp_path: Path) -> None:
    bench = bench_engine(pair({}, {})[:1], workloads=RUNS, turns=1, python=python)
    assert "ratio" not in str(bench)
    assert [row["ratio"] for row in bench.rows()] == [None, None]
    with pytest.raises(GacError, match="a bench of one model; expected two or more"):
        plots.speeds(bench)
    bench.save(tmp_path / "bench.json")
    assert EngineBench.load(tmp_path / "bench.json") == bench


STEP_S, READ_S, GRAPH_MS = 0.005, 0.001, 4.0


class Clock:
    seconds = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.seconds


class FakeGraph:
    replayed = 0

    def replay(self) -> None:
        FakeGraph.replayed += 1


class FakeEvent:
    """Events of a clock that goes on by 4 ms from each to the next."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.recorded += 1
        self.number = FakeEvent.recorded

    def elapsed_time(self, end: "FakeEvent") -> float:
        return GRAPH_MS * (end.number - self.number)


class FakeLLM:
    """Takes 1 ms a token that it reads, and 5 ms a step, which is one graph or several."""

    graphs = 1

    def __init__(self, **options: Any) -> None:
        self.options = options
        config = SimpleNamespace(get_vocab_size=lambda: 256)
        cache = SimpleNamespace(kv_cache_size_tokens=4096)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config, cache_config=cache))
        self._graphs = [FakeGraph() for _ in range(self.graphs)]

    def generate(self, prompts: Sequence[Any], sampling: Sequence[Any], use_tqdm: bool) -> None:
        assert not use_tqdm
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        assert all(64 <= token < 128 for prompt in ids for token in prompt)
        Clock.seconds += READ_S * sum(map(len, ids))
        for _ in range(max(each.max_tokens for each in sampling) - 1):
            Clock.seconds += STEP_S
            for graph in self._graphs:
                graph.replay()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {"CUDAGraph": type("CUDAGraph", (FakeGraph,), {"replay": FakeGraph.replay}), "Event": FakeEvent}
    fakes |= {"is_available": lambda: True, "get_device_name": lambda: "A GPU", "synchronize": lambda: None}
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(sys.modules[__name__], "FakeGraph", fakes["CUDAGraph"])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> vllm_engine.VllmEngine:
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__version__ = FakeLLM, SimpleNamespace, "0.26.0"
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_engine, "time", Clock)
    return vllm_engine.VllmEngine()


def opened(engine: vllm_engine.VllmEngine) -> dict[str, Any]:
    return engine.open("small", max_length=128, sequences=4, share=0.45, options={"dtype": "float32"})


def test_it_opens_a_model_as_it_is_told(engine: vllm_engine.VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answer = opened(engine)
    assert answer["kv_cache_tokens"] == 4096
    assert answer["device"].startswith("CPU (")
    assert {"vllm", "torch", "gac"} <= answer["versions"].keys()
    assert engine._llm.options == {
        "model": "small",
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "gpu_memory_utilization": 0.45,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "dtype": "float32",
    }


def test_it_times_runs_by_the_wall_clock(engine: vllm_engine.VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    opened(engine)
    assert engine.measure("prefill:2x8") == {"ms": pytest.approx(16), "graph_ms": None}
    assert engine.measure("decode:2@8") == {"ms": pytest.approx(5), "graph_ms": None}
    assert engine.measure("throughput:3x16")["ms"] > 15


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("graphs", "expected"), [(1, GRAPH_MS / 8), (2, None), (0, None)])
def test_a_step_that_is_a_graph_is_timed(graphs: int, expected: Any, engine: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(FakeLLM, "graphs", graphs)
    assert opened(engine)["device"] == "A GPU"
    before = FakeGraph.replayed
    assert engine.measure("decode:2@8") == {"ms": pytest.approx(5), "graph_ms": expected}
    repeated = 3 * 8 if graphs else 0
    assert FakeGraph.replayed - before == 2 * 64 * graphs + repeated  # all steps run, with and without the timer


def test_a_worker_imports_from_here_only_where_gac_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    assert worker_command(None) == [sys.executable, "-P", "-m", "gac.evaluation.engines.vllm_engine"]
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert worker_command("python3") == ["python3", "-m", "gac.evaluation.engines.vllm_engine"]
