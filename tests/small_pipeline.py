"""The pipeline as a user calls it, on the tiny model and four windows of text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import gac
from tests.compression.applying import logits


@dataclass(frozen=True)
class Small:
    """``allocate``, ``frontier`` and ``compress`` of the tiny model, or of another."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    text: Path

    @property
    def options(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer,
            "calibration": f"{self.text}:4x64",
            "profile": "nvidia-h100-80gb-hbm3",
            "progress": False,
        }

    def allocate(self, budget: Any, model: Any = None, **changed: Any) -> gac.Plan:
        return gac.allocate(self.model if model is None else model, budget, **(self.options | changed))

    def frontier(self, model: Any = None, **changed: Any) -> gac.Frontier:
        return gac.frontier(self.model if model is None else model, **(self.options | changed))

    def compress(self, plan: gac.Plan, model: Any = None, **changed: Any) -> Any:
        model = self.model if model is None else model
        return gac.compress(model, plan, tokenizer=self.tokenizer, progress=False, **changed)

    def there_and_back(self, plan: gac.Plan, folder: Path, model: Any = None) -> tuple[Any, Any]:
        """The compressed model, and the one that is loaded from its files; both say the same and have the plan."""
        plan.save(folder / "plan.json")
        assert gac.Plan.load(folder / "plan.json") == plan
        small = self.compress(plan, model=model)
        gac.save(small, folder / "small", tokenizer=self.tokenizer)
        again = gac.load(folder / "small").to(small.device)
        assert again.gac_plan == plan
        assert torch.equal(logits(again), logits(small))
        return small, again


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in model.state_dict().items()}


def has_state(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> bool:
    """Every value is that of the state, to the last bit."""
    return all(torch.equal(values, state[name]) for name, values in model.state_dict().items())
