"""``gac bench --engine vllm`` in the engine's CPU build: ``make test-vllm`` runs it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gac.evaluation.engines.records import EngineBench
from gac.plan.plan import Plan
from tests.cli.commands import refused, run
from tests.models.small import small_config, small_model
from tests.serving.test_vllm import LAYERS, save, shorter_values

PYTHON = os.environ.get("GAC_VLLM", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs an environment with vLLM: make test-vllm")
OPTIONS = ("--engine", "vllm", "--engine-python", PYTHON, "--engine-option", "dtype=float32")
EAGER = ("--engine-option", "enforce_eager=true")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def test_a_pair_is_timed_in_turns(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    dense, small, written = tmp_path / "dense", tmp_path / "small", tmp_path / "bench.json"
    save("llama", make_plan, small)
    small_model(small_config("llama", hidden_size=128, num_hidden_layers=LAYERS)).save_pretrained(dense)
    workloads = ("--workload", "prefill:2x64", "--workload", "decode:2@64", "--workload", "throughput:8x64")
    figure = tmp_path / "speeds.png"
    result = run(
        "bench", small, "--against", dense, *OPTIONS, *EAGER, *workloads, "--turns", 2, "-o", written, "--plot", figure
    )
    assert result.exit_code == 0, result.output
    bench = EngineBench.load(written)
    assert (bench.in_turns, bench.turns, bench.memory_share) == (True, 2, None)
    assert bench.device.startswith("CPU")
    assert [model.name for model in bench.models] == [str(dense), str(small)]
    assert [model.digest is None for model in bench.models] == [True, False]
    for model in bench.models:
        assert [timing.workload for timing in model.timings] == [word for word in workloads if ":" in word]
        assert all(len(timing.ms_samples) == 2 and timing.graph_ms is None for timing in model.timings)
    assert "ratio" in result.stdout
    assert figure.stat().st_size > 1000


def test_a_plan_that_the_engine_does_not_run_is_refused(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    shorter_values(make_plan).save_pretrained(tmp_path / "small")
    said = refused("bench", tmp_path / "small", *OPTIONS, *EAGER, "--workload", "decode:1@8")
    assert "layers.1.self_attn.v_proj is ValueLinear; expected Linear, LowRankLinear" in " ".join(said.split())


def test_an_architecture_that_the_engine_does_not_have_is_refused(tmp_path: Path) -> None:
    small_model(small_config("llama")).save_pretrained(tmp_path / "strange")
    path = tmp_path / "strange" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["StrangeForCausalLM"]}))
    said = refused("bench", tmp_path / "strange", *OPTIONS, *EAGER, "--workload", "decode:1@8")
    assert "StrangeForCausalLM" in said
    assert "expected a model and options that this engine runs" in " ".join(said.split())
