"""Models with layers of another kind than attention: the whole pipeline, and what the plan leaves alone."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gac
from gac.allocation.frontier import Frontier  # noqa: F401
from gac.core.errors import GacError
from gac.models.families import family_of
from gac.models.rotation import rotate
from gac.runtime.contract import COMPRESSED
from gac.runtime.fusion.quantised_inputs import QuantisingNorm
from gac.runtime.vllm.check import refusal
from tests.compression.applying import IDS, logits
from tests.models.small import TWO_KINDS, small_config, small_model, weights_of
from tests.models.test_wrappers import CODE
from tests.small_pipeline import Small

two_kinds = pytest.mark.parametrize(
    "model_type",
    ["granitemoehybrid", *(pytest.param(name, marks=pytest.mark.slow) for name in TWO_KINDS if name[0] != "g")],
)
FORMS = ("low_rank", "narrow", "narrow_pair", "heads", "head_dim", "skip", "latent")


def deep(model_type: str) -> Any:
    """Four layers, so that some can be skipped."""
    return small_model(small_config(model_type, num_hidden_layers=4))


@two_kinds
def test_the_pipeline_changes_linear_weights_alone(model_type: str, small: Small, tmp_path: Path) -> None:
    dense = deep(model_type)
    before = {name: values.clone() for name, values in dense.state_dict().items()}
    plan = small.allocate(0.6, model=dense, forms=("low_rank", "narrow", "skip"), schemes=("bf16", "w8a16"))
    assert plan.recipe.refit == "residual"
    assert {choice.form for choice in plan.weights if choice.changed} > {"dense"} or plan.params
    model: Any = small.compress(plan, model=dense)
    gac.save(model, tmp_path / "saved")
    loaded: Any = gac.load(tmp_path / "saved", verify=True)
    assert torch.equal(logits(loaded), logits(model))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(IDS, **options), loaded.generate(IDS, use_cache=False, **options))

    targeted = tuple(f"{weight.name}." for weight in weights_of(dense.config))
    left = {name for name in before if not name.startswith(targeted) and name != last_norm(dense)}
    assert any(name.endswith(("A_log", "dt_bias", "conv1d.weight", "conv.conv.weight")) for name in left)
    read, stored = loaded.state_dict(), load_file(tmp_path / "saved/model.safetensors")
    for name in left:
        assert torch.equal(read[name], before[name])
        assert name not in stored or torch.equal(stored[name], before[name])

    subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "saved"), "AutoModelForCausalLM"], check=True, cwd=tmp_path
    )
    torch.testing.assert_close(torch.load(tmp_path / "saved/logits.pt"), logits(model))


def last_norm(model: Any) -> str:
    return f"{family_of(model.config).last_norm}.weight"
