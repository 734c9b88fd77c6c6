"""The plugin's refusals that need no vLLM."""

from types import SimpleNamespace

import pytest

from gac.models.families import supported
from gac.runtime.contract import COMPRESSED
from gac.runtime.vllm.check import NOT_SERVED, refusal
from tests.compression.compressed import MakePlan
from tests.models.test_families import compressed_model


@pytest.mark.parametrize("model_type", ["bloom", "gptj"])
def test_architectures_that_the_plugin_does_not_serve_are_refused_by_name(model_type: str, make_plan: MakePlan) -> None:
    assert set(NOT_SERVED) < set(supported())
    model = compressed_model(model_type, make_plan)
    config = SimpleNamespace(**vars(model.config), model_type=f"{COMPRESSED}{model_type}")
    answer = refusal(config)
    assert (answer is None) is (model_type not in NOT_SERVED)
    if answer is not None:
        assert answer[0] == f"model type {model_type!r}"
        assert "transformers" in answer[2]
