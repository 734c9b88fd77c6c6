"""The plugin's refusals that need no vLLM."""

from types import SimpleNamespace

from gac.models.families import supported, wrappers
from gac.runtime.contract import COMPRESSED, SCHEMA
from gac.runtime.vllm.check import FEWER_EXPERTS, NOT_SERVED, SERVED_MIXTURES, SERVED_MULTIMODAL, refusal
from tests.models.small import MIXTURES


def test_multimodal_models_are_served_or_refused_by_name() -> None:
    assert set(SERVED_MULTIMODAL) < set(wrappers())
    for model_type in wrappers():
        config = SimpleNamespace(model_type=COMPRESSED + model_type, vision_config=SimpleNamespace())
        value, _, remedy = refusal(config) or ("", "", "")
        if model_type in SERVED_MULTIMODAL:
            assert value == "config.json has no key gac"
        else:
            assert value == f"model type {model_type!r}, a multimodal model"
            assert "transformers" in remedy


def test_fewer_heads_in_a_multimodal_model_are_refused() -> None:
    module = {"form": "heads", "dim": 1, "module": "Linear", "sizes": {}}
    header = {"schema_version": SCHEMA, "modules": {"model.language_model.layers.0.self_attn.q_proj": module}}
    config = SimpleNamespace(model_type="gac_llava", text_config=SimpleNamespace(), gac=header)
    value, _, _ = refusal(config) or ("", "", "")
    assert value.endswith("q_proj has form heads, which vLLM does not run in multimodal models")


def test_architectures_that_the_plugin_does_not_serve_are_refused_by_name() -> None:
    assert set(NOT_SERVED) < set(supported())
    for model_type in supported():
        value, _, remedy = refusal(SimpleNamespace(model_type=COMPRESSED + model_type)) or ("", "", "")
        if model_type in NOT_SERVED:
            assert value == f"model type {model_type!r}"
            assert "transformers" in remedy
        else:
            assert value == "config.json has no key gac"


def test_mixtures_are_served_or_refused_by_name() -> None:
    assert set(SERVED_MIXTURES) < set(MIXTURES)
    for model_type in MIXTURES:
        config = SimpleNamespace(model_type=COMPRESSED + model_type, num_experts=8)
        value, _, remedy = refusal(config) or ("", "", "")
        if model_type in SERVED_MIXTURES:
            assert value == "config.json has no key gac"
        else:
            assert value == f"model type {model_type!r}, a mixture of experts"
            assert "transformers" in remedy


def test_fewer_experts_of_other_mixtures_are_refused_by_name() -> None:
    module = {"form": "experts", "dim": 6, "module": "Router", "sizes": {"experts": 6}}
    for model_type in SERVED_MIXTURES:
        header = {"schema_version": SCHEMA, "modules": {"model.layers.0.mlp.gate": module}}
        config = SimpleNamespace(model_type=COMPRESSED + model_type, num_experts=8, gac=header)
        value, expected, _ = refusal(config) or ("", "", "")
        refused = f"model.layers.0.mlp.gate of a {model_type} has form experts"
        assert value == ("" if model_type in FEWER_EXPERTS else refused)
        assert not value or expected == f"one of {', '.join(FEWER_EXPERTS)}"


def test_experts_of_few_bits_are_refused_by_name() -> None:
    module = {"form": "dense", "dim": 8, "module": "Experts", "sizes": {"experts": 8, "width": 64}}
    module |= {"scheme": "w8a8", "storage": "Integers8", "options": {}}
    header = {"schema_version": SCHEMA, "modules": {"model.layers.0.mlp.experts": module}}
    config = SimpleNamespace(model_type="gac_mixtral", num_local_experts=8, gac=header)
    value, expected, _ = refusal(config) or ("", "", "")
    assert value == "model.layers.0.mlp.experts has scheme w8a8, in which vLLM does not run experts"
    assert expected == "experts in bf16 or fp8"
    module |= {"scheme": "fp8", "storage": "Floats8"}
    assert refusal(config) is None
