"""Compressed models over several processes in vLLM: ``make test-vllm`` runs them in the engine's CPU build."""

from collections.abc import Callable
from pathlib import Path

from gac.plan.plan import Plan
from tests.compression.compressed import compressed
from tests.serving.engine import Request, needs_vllm, save, serve, small

pytestmark = needs_vllm


def test_two_processes_give_the_tokens_of_one(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    # One matrix of q, k and v; a sum of attention and MLP at once; vLLM's Transformers backend.
    model_types = ("llama", "qwen3", "gemma3_text", "phi3", "cohere", "olmo2")
    requests = [save(small(name), make_plan, tmp_path / name, tensor_parallel_size=2) for name in model_types]
    serve(requests, tmp_path)
    for request in requests:
        request.assert_same()


def test_fewer_key_value_heads_than_processes_are_shared(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    request = save(small("llama", num_key_value_heads=1), make_plan, tmp_path, tensor_parallel_size=2)
    serve([request], tmp_path)
    request.assert_same()


def test_a_width_that_processes_do_not_divide_is_named(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    model = small("llama")
    names = [f"model.layers.2.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    compressed(model, make_plan, dict.fromkeys(names, ("narrow", 97))).save_pretrained(tmp_path)
    request = Request(tmp_path, {"tensor_parallel_size": 2})
    serve([request], tmp_path)
    assert "layers.2.mlp.gate_up_proj has 97 features; expected a multiple of 2 processes" in request.log
