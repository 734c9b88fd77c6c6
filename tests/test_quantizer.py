"""``from_pretrained`` with a plan: the base model, compressed while it is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import gac
from gac.core.errors import PlanError
from tests.compression.applying import logits


@pytest.fixture
def plan(directory: Path, text_file: Path, tmp_path: Path) -> Path:
    plan = gac.allocate(
        directory, 0.7, calibration=f"{text_file}:4x64", profile="nvidia-h100-80gb-hbm3", progress=False
    )
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_base_model_is_compressed_while_it_is_loaded(directory: Path, plan: Path, tmp_path: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, quantization_config=gac.GacConfig(plan))
    small = gac.compress(directory, gac.Plan.load(plan), progress=False)
    assert type(loaded) is type(small)
    assert loaded.gac_plan == gac.Plan.load(plan)
    assert torch.equal(logits(loaded), logits(small.cpu()))
    loaded.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    assert torch.equal(logits(gac.load(tmp_path / "saved").cpu()), logits(loaded))


def test_a_plan_for_other_weights_is_refused(directory: Path, plan: Path) -> None:
    with pytest.raises(PlanError, match=r"the model's config and weights have digest .*; expected .*, those of"):
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, quantization_config=gac.GacConfig(plan))


def test_a_plan_that_is_none_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file or directory"):
        gac.GacConfig(tmp_path / "plan.json")
