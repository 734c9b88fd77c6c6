"""The plugin's refusals that need no vLLM."""

from types import SimpleNamespace

from gac.models.families import supported, wrappers
from gac.runtime.contract import COMPRESSED
from gac.runtime.vllm.check import NOT_SERVED, refusal


def test_multimodal_models_are_refused_by_name() -> None:
    for model_type in wrappers():
        config = SimpleNamespace(model_type=COMPRESSED + model_type, text_config=SimpleNamespace())
        value, _, remedy = refusal(config) or ("", "", "")
        assert value == f"model type {model_type!r}, a multimodal model"
        assert "transformers" in remedy


def test_architectures_that_the_plugin_does_not_serve_are_refused_by_name() -> None:
    assert set(NOT_SERVED) < set(supported())
    for model_type in supported():
        value, _, remedy = refusal(SimpleNamespace(model_type=COMPRESSED + model_type)) or ("", "", "")
        if model_type in NOT_SERVED:
            assert value == f"model type {model_type!r}"
            assert "transformers" in remedy
        else:
            assert value == "config.json has no key gac"
