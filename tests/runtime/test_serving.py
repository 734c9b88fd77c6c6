"""What servers find in a compressed model, and continuous batching of transformers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from gac.checkpoint.classes import classes_of
from gac.core.errors import ModelError
from tests.compression.applying import logits
from tests.compression.compressed import MakePlan, compressed, small_compressed
from tests.models.small import small_config, small_model


class Other(nn.Module):
    """A server's own layer in the place of a linear one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_other_layers_can_stand_for_the_linear_ones(model_type: str, make_plan: MakePlan) -> None:
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


ATTENTION = "model.layers.1.self_attn"
PROMPTS = [[7, 3, 9, 4, 8], [11, 5]]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
REFUSED = {
    "head_dim": ({f"{ATTENTION}.{name}_proj": ("head_dim", 8) for name in "vo"}, "v_proj writes 2 heads of 8 numbers"),
    "heads": ({f"{ATTENTION}.{name}_proj": ("heads", 1) for name in "qkvo"}, "k_proj writes 1 heads of 32 numbers"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_layers_of_other_sizes_are_refused(form: str, make_plan: MakePlan) -> None:
    changes, numbers = REFUSED[form]
    model = compressed(small_model(small_config("llama")), make_plan, changes)
    with pytest.raises(ModelError, match=f"{ATTENTION}.{numbers}; expected 2 of 32 in every layer"):
        model.generate_batch(PROMPTS)


def test_pairs_give_the_tokens_of_generate(make_plan: MakePlan) -> None:
    batching = pytest.importorskip("transformers.generation.configuration_utils").ContinuousBatchingConfig(
        num_blocks=8, max_batch_tokens=64, block_size=32
    )
    pairs = {f"{ATTENTION}.{name}_proj": ("low_rank", 8) for name in "qkvo"}
    model = compressed(small_model(small_config("llama")), make_plan, pairs)
    options: Any = GenerationConfig
    found = model.generate_batch(
        PROMPTS,
        generation_config=options(**GREEDY, eos_token_id=-1),
        continuous_batching_config=batching,
        progress_bar=False,
    )
    alone = []
    for prompt in PROMPTS:
        ids: Tensor = model.generate(torch.tensor([prompt]), eos_token_id=None, **GREEDY)
        alone.append(ids[0, len(prompt) :].tolist())
    assert [request.generated_tokens for request in found.values()] == alone
