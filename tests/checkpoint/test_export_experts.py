"""Mixtures whose layers keep as many experts each are checkpoints of their stock architecture."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import gac
from gac.core.errors import CheckpointError
from tests.compression.applying import IDS, logits
from tests.compression.compressed import MakePlan
from tests.refused import assert_refused
from tests.serving.mixtures import LAYERS, experts_alone, mixed, mixture
from tests.small_pipeline import Small


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "gpt_oss", "glm4_moe"])
def test_as_many_experts_in_every_layer_are_a_stock_model(model_type: str, make_plan: MakePlan, tmp_path: Path) -> None:
    dense = mixture(model_type, mlp_only_layers=[])
    model = mixed(dense, make_plan, experts_alone(dense.config, [6] * LAYERS))
    gac.export(model, tmp_path / "stock")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(loaded).__module__.startswith("transformers.")
    assert getattr(loaded.config, "gac", None) is None
    assert sum(values.numel() for values in loaded.parameters()) == sum(values.numel() for values in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(logits(loaded, IDS), logits(model, IDS))


def test_a_plan_of_the_same_count_is_a_stock_model_that_writes_the_same(small: Small, tmp_path: Path) -> None:
    dense = mixture("qwen3_moe", mlp_only_layers=[], num_hidden_layers=2)
    asked = {"forms": ["experts"], "schemes": ["bf16"], "latency": "any", "same_count": True}
    plan = small.allocate(0.5, model=dense, **asked)
    assert len({choice.becomes for choice in plan.experts[0]}) == 1
    plan.recipe.save(tmp_path / "recipe.json")
    options = {name: value for name, value in small.options.items() if name in ("tokenizer", "progress")}
    assert gac.allocate(dense, recipe=tmp_path / "recipe.json", **options).sites == plan.sites
    model = small.compress(plan, model=dense)
    gac.export(model, tmp_path / "stock")
    assert not [*(tmp_path / "stock").glob("*.py")]
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(loaded).__module__.startswith("transformers.")
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(loaded.generate(IDS, **options), model.generate(IDS, **options))


def test_numbers_of_experts_that_differ_are_refused_by_name(make_plan: MakePlan, tmp_path: Path) -> None:
    dense = mixture("mixtral")
    model = mixed(dense, make_plan, experts_alone(dense.config))
    said = "model.layers.2.mlp.experts has 3 experts of 48 neurons, model.layers.1.mlp.experts 8 of 48"
    assert_refused(
        lambda: gac.export(model, tmp_path / "stock"), said, "as many experts", "--same-count", error=CheckpointError
    )
    assert_refused(
        lambda: gac.export(model, tmp_path / "stock", merge=True),
        "model.layers.0.mlp.gate is experts",
        "to be merged",
        error=CheckpointError,
    )
