"""vLLM's Transformers backend says what the model itself says."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gac.plan.plan import Plan
from tests.models.small import small_config
from tests.serving.servers import COMMANDS, printed_by_the_client, running, said
from tests.serving.wordy import TOKENS, prompts, wordy, wordy_stored

VLLM = os.environ.get("GAC_VLLM") or shutil.which("vllm")
SMALL = "--dtype float32 --max-model-len 256 --gpu-memory-utilization 0.1 --enforce-eager"
"""The weights as they were saved, and little memory; nothing is compiled for a model that says a few words."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Several processes on one NUMA node."""

TIE = 0.05
"""Standard deviations of logits: the model has random weights, and near ties go either way in sums of 16 bits."""

pytestmark = pytest.mark.skipif(VLLM is None, reason="needs the command vllm, on the path or named by GAC_VLLM")


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_its_tokens_are_those_of_generate(model_type: str, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    pytest.importorskip("openai")
    model = wordy(model_type, make_plan)
    model.save(tmp_path / "small")
    command = [str(VLLM), *COMMANDS["vllm"], *SMALL.split()]
    with running(command, tmp_path, ENVIRONMENT) as port:
        answers = [answer.split() for answer in said(port, prompts(), TOKENS)]
        assert answers == [model.says(prompt).split() for prompt in prompts()]
        assert printed_by_the_client(port).split() == model.says("Heat is", 32).split()


def test_two_processes_say_the_same(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    pytest.importorskip("openai")
    model = wordy("llama", make_plan)
    model.save(tmp_path / "small")
    command = [str(VLLM), *COMMANDS["vllm"], *SMALL.split(), "--tensor-parallel-size", "2"]
    with running(command, tmp_path, ENVIRONMENT | UNBOUND) as port:
        answers = [answer.split() for answer in said(port, prompts(), TOKENS)]
    assert answers == [model.says(prompt).split() for prompt in prompts()]


@pytest.mark.parametrize(
    ("schemes", "dtype"),
    [
        (("w8a8",), "float32"),
        (("fp8",), "float32"),
        (("w8a8", "bf16", "fp8"), "float32"),  # none of which are merged
        (("w4a16:32",), "bfloat16"),  # the CPU's kernel has no float32
    ],
)
def test_weights_of_few_bits(
    schemes: tuple[str, ...], dtype: str, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    pytest.importorskip("openai")
    model = wordy_stored(schemes, make_plan, getattr(torch, dtype))
    model.save(tmp_path / "small")
    command = [str(VLLM), *COMMANDS["vllm"], *SMALL.replace("float32", dtype).split()]
    with running(command, tmp_path, ENVIRONMENT) as port:
        answers = said(port, prompts(), TOKENS)
    assert max(map(model.parted, prompts(), answers)) <= TIE


PARSE = """
import json, sys
import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
config = CompressedTensorsConfig.from_config(json.load(open(sys.argv[1]))["quantization_config"])
config.packed_modules_mapping = {}
layer = torch.nn.Linear(1, 1)
with set_current_vllm_config(VllmConfig(model_config=ModelConfig(sys.argv[2]))):
    named = {name: config.get_scheme(layer, name) for name in [*config.target_scheme_map, *config.ignore]}
told = {name: one and [type(one).__name__, getattr(one, "num_bits", 8)] for name, one in named.items()}
print(json.dumps(told))
"""
FOUND = {
    "w8a16": ["CompressedTensorsWNA16", 8],
    "w4a16:32": ["CompressedTensorsWNA16", 4],
    "w3a16:32": ["CompressedTensorsWNA16", 3],
    "w2a16:32": ["CompressedTensorsWNA16", 2],
    "w8a8": ["CompressedTensorsW8A8Int8", 8],
    "fp8": ["CompressedTensorsW8A8Fp8", 8],
}


def test_its_parser_finds_the_scheme_of_every_module(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    model = wordy_stored([*FOUND, "bf16"], make_plan, torch.bfloat16)
    model.save(tmp_path)
    python, dense = Path(str(VLLM)).with_name("python"), tmp_path / "dense"
    small_config("llama").save_pretrained(dense)
    told = subprocess.run(
        [python, "-c", PARSE, tmp_path / "config.json", dense], capture_output=True, text=True, check=True
    )
    found = json.loads(told.stdout.splitlines()[-1])
    due = {one.name: FOUND.get(one.scheme) for one in model.model.gac_plan.weights}
    modules = dict(model.model.named_modules())
    for name, scheme in due.items():
        pair = hasattr(modules[name], "first")
        assert [found[one] for one in ([f"{name}.first", f"{name}.second"] if pair else [name])] == [scheme] * (
            1 + pair
        )
    assert found["lm_head"] is None
