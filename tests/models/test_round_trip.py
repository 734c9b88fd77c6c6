"""Every supported architecture: build, compress, save, load; the loaded model has the same logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gac
from gac.plan.plan import Plan
from tests.compression.applying import IDS, applied, logits
from tests.models.small import every_family, small_config, small_model, weights_of
from tests.models.test_families import full_dims, smaller_dims


@pytest.mark.slow
@every_family
def test_a_compressed_model_is_saved_and_loaded(
    model_type: str, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    config = small_config(model_type)
    dense = logits(small_model(config))
    full = applied(small_model(config), make_plan(config, full_dims(weights_of(config))))
    assert (logits(full) - dense).abs().max() < 1e-4 * dense.abs().max()
    plan = make_plan(config, smaller_dims(weights_of(config)))
    small: Any = applied(small_model(config), plan)
    small.gac_plan = plan
    gac.save(small, tmp_path / "saved")
    loaded: Any = gac.load(tmp_path / "saved")
    assert loaded.gac_plan == plan
    assert torch.equal(logits(loaded), logits(small))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(IDS, **options), loaded.generate(IDS, use_cache=False, **options))
