"""What servers find in a compressed model."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gac.checkpoint.classes import classes_of
from gac.plan.plan import Plan
from tests.compression.applying import logits
from tests.compression.compressed import small_compressed


class Other(nn.Module):
    """A server's own layer in the place of a linear one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_other_layers_can_stand_for_the_linear_ones(model_type: str, make_plan: Callable[..., Plan]) -> None:
    model = small_compressed(model_type, make_plan)
    expected = logits(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        model.set_submodule(name, Other(linear))
    assert torch.equal(logits(model), expected)


def test_transformers_serve_finds_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(transformers=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.model_manager", server)
    classes = classes_of("llama")
    classes.config.from_dict({"architectures": ["GacLlamaForCausalLM", "LlamaForCausalLM"]})
    assert vars(server.transformers) == {"GacLlamaForCausalLM": classes.causal_lm}
    classes.config.from_dict({"architectures": "GacLlamaModel"})
    assert len(vars(server.transformers)) == 1
