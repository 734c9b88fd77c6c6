"""The worker's use of vLLM, with a fake ``LLM``, a fake clock and fake CUDA graphs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gac.evaluation.engines import vllm_engine
from gac.evaluation.engines.process import worker_command

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
