"""vLLM with GAC's plugin gives the tokens of ``generate``: ``make test-vllm`` runs it in the engine's CPU build."""

import json
import os
import random
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from gac.plan.plan import Plan
from tests.compression.compressed import compressed
from tests.compression.stored import stored_model
from tests.models.small import small_config, small_model, weights_of

PYTHON = os.environ.get("GAC_VLLM", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs an environment with vLLM: make test-vllm")
WORKER = Path(__file__).with_name("vllm_worker.py")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite")
LAYERS, TOKENS = 6, 16
SOME = ("q_proj", "gate_proj", "gate_up_proj", "qkv_proj")


def changes(config: Any) -> dict[str, tuple[str, int]]:
    """A dense layer; pairs of some siblings, of the others, and of all weights; narrower MLPs; skipped blocks."""
    chosen = {}
    for weight in weights_of(config):
        layer, name = int(weight.name.split(".")[2]), weight.name.rpartition(".")[2]
        if layer in (1, 3) and (name in SOME) == (layer == 1):
            chosen[weight.name] = ("low_rank", 16)
        elif layer == 2 and weight.neurons:
            chosen[weight.name] = ("narrow", 96)
        elif layer == 4:
            chosen[weight.name] = ("low_rank", 24)
        elif (layer, "self_attn" in weight.name) in ((2, True), (5, False)):
            chosen[weight.name] = ("skip", 0)
    return chosen


def prompts() -> list[list[int]]:
    """Draw 20 prompts of 4 to 23 tokens."""
    draw = random.Random(0)
    return [[draw.randrange(3, 250) for _ in range(4 + index)] for index in range(20)]


def save(model_type: str, make_plan: Callable[..., Plan], folder: Path, **changed: Any) -> list[list[int]]:
    """Save a small compressed model; returns the tokens of ``generate`` after each prompt."""
    config = small_config(model_type, hidden_size=128, num_hidden_layers=LAYERS, **changed)
    model = compressed(small_model(config), make_plan, changes(config)).float()
    model.save_pretrained(folder)
    return generated(model)


def generated(model: Any) -> list[list[int]]:
    """The greedy tokens of ``generate`` after each prompt."""
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts()]


def serve(folder: Path, environment: Mapping[str, str] | None = None, **options: Any) -> list[list[int]]:
    """The same tokens as vLLM gives them, run with these variables in its environment."""
    done = run(folder, environment, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    answer: list[list[int]] = json.loads((folder / "answer.json").read_text())
    return answer


def run(folder: Path, environment: Mapping[str, str] | None = None, **options: Any) -> CompletedProcess[str]:
    request = {"options": {"dtype": "float32", "enforce_eager": True, **options}, "prompts": prompts()}
    (folder / "request.json").write_text(json.dumps({**request, "tokens": TOKENS}))
    command = [PYTHON, str(WORKER), str(folder), str(folder / "request.json"), str(folder / "answer.json")]
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    return subprocess.run(
        command, env={**inherited, **(environment or {})}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_its_tokens_are_those_of_generate(model_type: str, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    expected = save(model_type, make_plan, tmp_path)
    assert serve(tmp_path) == expected


def shorter_values(make_plan: Callable[..., Plan]) -> Any:
    model = small_model(small_config("llama"))
    names = [f"model.layers.1.self_attn.{name}" for name in ("v_proj", "o_proj")]
    return compressed(model, make_plan, dict.fromkeys(names, ("head_dim", 8)))


def fewer_heads(make_plan: Callable[..., Plan]) -> Any:
    config = small_config("llama")
    names = [weight.name for weight in weights_of(config) if weight.name.startswith("model.layers.1.self_attn.")]
    return compressed(small_model(config), make_plan, dict.fromkeys(names, ("heads", 1)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (shorter_values, "layers.1.self_attn.v_proj is ValueLinear; expected Linear, LowRankLinear"),
        (fewer_heads, "in place of 128; expected all heads of the dense model"),
        (partial(stored_model, "llama"), "; expected Linear, LowRankLinear, Absent, Constant in 16 bits"),
    ],
)
def test_what_the_engine_does_not_run_is_named(
    make: Callable[..., Any], message: str, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    make(make_plan=make_plan).save_pretrained(tmp_path)
    done = run(tmp_path)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
