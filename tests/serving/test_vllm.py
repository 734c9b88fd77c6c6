"""vLLM's Transformers backend says what the model itself says."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gac.plan import Plan
from tests.serving.servers import COMMANDS, printed_by_the_client, running, said
from tests.serving.wordy import TOKENS, prompts, wordy

VLLM = os.environ.get("GAC_VLLM") or shutil.which("vllm")
SMALL = "--dtype float32 --max-model-len 256 --gpu-memory-utilization 0.1 --enforce-eager"
"""The weights as they were saved, and little memory; nothing is compiled for a model that says a few words."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

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
