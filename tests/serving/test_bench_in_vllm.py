"""``gac bench --engine vllm`` in the engine's CPU build: ``make test-vllm`` runs it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gac.evaluation.engines.records import EngineBench
from gac.plan.plan import Plan
from tests.changed import edited
from tests.cli.commands import refused, run
from tests.models.small import small_model
from tests.serving.engine import PYTHON, needs_vllm, save, small
from tests.serving.mixtures import changes, mixed, mixture

pytestmark = needs_vllm
OPTIONS = ("--engine", "vllm", "--engine-python", PYTHON, "--engine-option", "dtype=float32")
EAGER = ("--engine-option", "enforce_eager=true")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def test_a_pair_is_timed_in_turns(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    dense, compressed, written = tmp_path / "dense", tmp_path / "small", tmp_path / "bench.json"
    save(small("llama"), make_plan, compressed)
    small("llama").save_pretrained(dense)
    workloads = ("--workload", "prefill:2x64", "--workload", "decode:2@64", "--workload", "throughput:8x64")
    figure = tmp_path / "speeds.png"
    models = (compressed, "--against", dense)
    result = run("bench", *models, *OPTIONS, *EAGER, *workloads, "--turns", 2, "-o", written, "--plot", figure)
    assert result.exit_code == 0, result.output
    bench = EngineBench.load(written)
    assert (bench.in_turns, bench.turns, bench.memory_share) == (True, 2, None)
    assert bench.device.startswith("CPU")
    assert [model.name for model in bench.models] == [str(dense), str(compressed)]
    assert [model.digest is None for model in bench.models] == [True, False]
    for model in bench.models:
        assert [timing.workload for timing in model.timings] == [word for word in workloads if ":" in word]
        assert all(len(timing.ms_samples) == 2 and timing.graph_ms is None for timing in model.timings)
    assert "ratio" in result.stdout
    assert figure.stat().st_size > 1000


def test_a_mixture_without_weights_is_timed(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    config = mixture("qwen3_moe").config
    with torch.device("meta"):
        model = mixed(small_model(config), make_plan, changes(config))
    model.save_pretrained(tmp_path / "mixture", state_dict={})
    words = (
        "--engine-option",
        "load_format=dummy",
        "--workload",
        "decode:2@16",
        "--turns",
        1,
        "-o",
        tmp_path / "b.json",
    )
    result = run("bench", tmp_path / "mixture", *OPTIONS, *EAGER, *words)
    assert result.exit_code == 0, result.output
    assert len(EngineBench.load(tmp_path / "b.json").models) == 1


def test_an_architecture_that_the_engine_does_not_have_is_refused(tmp_path: Path) -> None:
    small("llama").save_pretrained(tmp_path / "strange")
    with edited(tmp_path / "strange" / "config.json") as config:
        config["architectures"] = ["StrangeForCausalLM"]
    said = refused("bench", tmp_path / "strange", *OPTIONS, *EAGER, "--workload", "decode:1@8")
    assert "StrangeForCausalLM" in said
    assert "expected a model and options that this engine runs" in " ".join(said.split())
