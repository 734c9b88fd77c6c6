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


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_as_many_experts_in_every_layer_are_a_stock_model(model_type: str, make_plan: MakePlan, tmp_path: Path) -> None:
    dense = mixture(model_type, mlp_only_layers=[])
    model = mixed(dense, make_plan, experts_alone(dense.config, [5] * LAYERS))
    gac.export(model, tmp_path / "stock")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(loaded).__module__.startswith("transformers.")
    assert getattr(loaded.config, "gac", None) is None
    assert sum(values.numel() for values in loaded.parameters()) == sum(values.numel() for values in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(logits(loaded, IDS), logits(model, IDS))


def test_numbers_of_experts_that_differ_are_refused_by_name(make_plan: MakePlan, tmp_path: Path) -> None:
    dense = mixture("mixtral")
    model = mixed(dense, make_plan, experts_alone(dense.config))
    said = "model.layers.2.mlp.experts has 3 experts of 48 neurons, model.layers.1.mlp.experts 8 of 48"
    assert_refused(lambda: gac.export(model, tmp_path / "stock"), said, "as many experts", error=CheckpointError)
    assert_refused(
        lambda: gac.export(model, tmp_path / "stock", merge=True),
        "model.layers.0.mlp.gate is experts",
        "to be merged",
        error=CheckpointError,
    )
