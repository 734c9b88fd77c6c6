"""Adapters over compressed models in vLLM, beside peft: ``make test-vllm`` runs them in the engine's CPU build."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gac.plan.plan import Plan
from gac.runtime.modules import LowRankLinear
from tests.compression.compressed import compressed
from tests.serving.engine import Request, changes, generate, needs_vllm, serve, small

pytestmark = needs_vllm
RANK, ALPHA = 4, 8


def with_adapter(model: Any, folder: Path) -> Any:
    """Save an adapter of random numbers, made by peft for linear layers, with low-rank pairs beside them."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    pairs = {name: module for name, module in model.named_modules() if isinstance(module, LowRankLinear)}
    targets = sorted(name for name in names if name.rpartition(".")[0] not in pairs and name != "lm_head")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    torch.manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, pair in pairs.items():
        first, second = torch.randn(RANK, pair.in_features) * 0.1, torch.randn(pair.out_features, RANK) * 0.1
        tensors[f"base_model.model.{name}.lora_A.weight"] = first
        tensors[f"base_model.model.{name}.lora_B.weight"] = second
        pair.register_forward_hook(added(first, second))
    save_file(tensors, folder / "adapter_model.safetensors")
    return adapted


def added(first: Tensor, second: Tensor) -> Callable[..., Tensor]:
    def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + ALPHA / RANK * (inputs[0] @ first.T @ second.T)

    return hook


def test_an_adapter_gives_the_tokens_of_peft(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    requests = []
    for model_type in ("llama", "qwen3", "olmo2"):
        folder = tmp_path / model_type
        model = compressed(small(model_type), make_plan, changes(small(model_type).config)).float()
        model.save_pretrained(folder)
        plain = generate(model)
        adapted = with_adapter(model, folder / "adapter")
        request = Request(folder, {"enable_lora": True, "max_lora_rank": 8}, generate(adapted), folder / "adapter")
        assert request.expected["tokens"] != plain["tokens"]
        requests.append(request)
    serve(requests, tmp_path)
    for request in requests:
        request.assert_same()
