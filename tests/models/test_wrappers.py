"""Multimodal models around a decoder of a known layout: the decoder is compressed, and the rest stays as it is."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

import gac
from gac.core.errors import CheckpointError
from gac.models.families import family_of, supported, text_config, wrappers
from gac.models.plain import check_plain
from gac.models.processors import processor_files
from gac.models.rotation import rotated
from gac.models.sites import Weight
from gac.plan.plan import Plan
from gac.runtime.architectures import factory_of
from gac.testing.models import tiny_text
from tests.compression.applying import IDS, smaller_dims, with_dims
from tests.compression.compressed import MakePlan
from tests.models.small import linear_weights, weights_of
from tests.models.wrappers import WITH_IMAGES, image_inputs, wrapper_config, wrapper_model
from tests.refused import assert_refused
from tests.without_gac import WithoutGac

FEW = ("gemma3", "glmga", "llava", "smolvlm")
"""Norms on both sides; a config whose class is another's; Llama; another name of the decoder."""


def some_first(names: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "model_type", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


every_wrapper, with_images = some_first(wrappers()), some_first(WITH_IMAGES)


def with_fewer_heads(weights: Sequence[Weight]) -> dict[str, tuple[str, int]]:
    """Low rank in the first layer; in the second a narrower MLP, and half the heads where they can be fewer."""
    return smaller_dims(weights) | {w.name: ("heads", 1) for w in weights if ".1." in w.name and w.groups == 2}


def compressed(model_type: str, make_plan: MakePlan) -> Any:
    return with_dims(wrapper_model(wrapper_config(model_type)), with_fewer_heads, make_plan)


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs or {"input_ids": IDS})).logits


@every_wrapper
def test_the_sites_are_the_linear_layers_of_the_decoder(model_type: str) -> None:
    config = wrapper_config(model_type)
    model: Any = wrapper_model(config)
    embedding = model.get_input_embeddings()
    decoder = next(
        name.rpartition(".")[0] for name, module in model.named_modules(remove_duplicate=False) if module is embedding
    )
    theirs = linear_weights(model)
    assert all(name.startswith(f"{decoder}.") for name in theirs)
    assert {weight.name: (weight.out_features, weight.in_features) for weight in weights_of(config)} == theirs
    check_plain(model, theirs)


@every_wrapper
def test_the_decoder_alone_changes_in_a_round_trip(
    model_type: str, make_plan: MakePlan, without_gac: WithoutGac, tmp_path: Path
) -> None:
    model = compressed(model_type, make_plan)
    dense = wrapper_model(model.config).state_dict()
    gac.save(model, tmp_path / "saved")
    loaded: Any = gac.load(tmp_path / "saved")
    assert torch.equal(logits(loaded), logits(model))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_cache=False, **options))

    changed = tuple(f"{weight.name}." for weight in loaded.gac_plan.weights if weight.changed)
    left = {name: values for name, values in dense.items() if not name.startswith(changed)}
    read, stored = loaded.state_dict(), load_file(tmp_path / "saved/model.safetensors")
    assert {name for name in read if not name.startswith(changed)} == left.keys()
    assert stored.keys() == read.keys() - loaded.all_tied_weights_keys.keys()
    for name, values in left.items():
        assert values.dtype == read[name].dtype
        assert torch.equal(values, read[name])
        assert name not in stored or torch.equal(values, stored[name])

    again = factory_of(type(model.config)).from_pretrained(tmp_path / "saved").eval()
    assert type(again) is type(loaded)
    assert torch.equal(logits(again), logits(model))
    without_gac.check(tmp_path / "saved", model)


@with_images
def test_where_nothing_is_changed_text_about_an_image_is_the_same(
    model_type: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    model: Any = wrapper_model(wrapper_config(model_type))
    inputs = image_inputs(model)
    other = inputs | {"pixel_values": -2 * inputs["pixel_values"]}
    expected, theirs = logits(model, **inputs), model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert not torch.allclose(logits(model, **other), expected)
    model.gac_plan = make_plan(model.config, {})
    gac.save(model, tmp_path / "saved")
    loaded = gac.load(tmp_path / "saved")
    torch.testing.assert_close(logits(loaded, **inputs), expected)  # weights lie elsewhere in memory
    assert torch.equal(loaded.generate(**inputs, max_new_tokens=4, do_sample=False), theirs)


@pytest.mark.parametrize("model_type", ["gemma3", "llava", "mistral3", "paligemma", "smolvlm"])
def test_an_image_reaches_the_compressed_decoder_as_embeddings(model_type: str, make_plan: MakePlan) -> None:
    model = compressed(model_type, make_plan)
    decoder, inputs, calls = family_of(model.config).inside, image_inputs(model), list[Any]()
    handle = model.get_submodule(decoder).register_forward_pre_hook(
        lambda _module, _args, named: calls.append(named), with_kwargs=True
    )
    expected = logits(model, **inputs)
    handle.remove()
    alone = AutoModelForCausalLM.from_config(text_config(model.config))
    alone.model, alone.lm_head = model.get_submodule(decoder), model.lm_head
    (named,) = calls
    kept = {name: named[name] for name in ("inputs_embeds", "attention_mask", "position_ids") if name in named}
    assert kept["inputs_embeds"].shape[1] == inputs["input_ids"].shape[1]
    assert torch.equal(logits(alone, **kept), expected)


@pytest.fixture
def llava(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A tiny Llava's directory, with a tokenizer and a processor."""
    wrapper_model(wrapper_config("llava")).save_pretrained(tmp_path / "llava")
    tiny_tokenizer.save_pretrained(tmp_path / "llava")
    (tmp_path / "llava/preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    (tmp_path / "llava/chat_template.jinja").write_text("{{ messages }}")
    return tmp_path / "llava"


def allocated(llava: Path) -> Plan:
    return gac.allocate(llava, 0.7, calibration=tiny_text(), workloads=(), progress=False)


def test_the_pipeline_from_a_directory(llava: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = allocated(llava)
    assert all(weight.name.startswith("model.language_model.layers.") for weight in plan.weights)
    assert plan.measured.params == sum(
        values.numel() for values in AutoModelForImageTextToText.from_pretrained(llava).parameters()
    )
    model: Any = gac.compress(llava, plan, calibration=tiny_text(), progress=False)
    vision = AutoModelForImageTextToText.from_pretrained(llava).model.vision_tower.state_dict()
    assert all(torch.equal(values, vision[name]) for name, values in model.model.vision_tower.state_dict().items())
    caplog.clear()
    gac.save(model, tmp_path / "saved")
    assert "without" not in caplog.text
    for name in ("preprocessor_config.json", "chat_template.jinja"):
        assert (tmp_path / "saved" / name).read_bytes() == (llava / name).read_bytes()
    assert gac.verify(tmp_path / "saved").files >= 5
    with pytest.raises(
        CheckpointError, match="a GacLlavaForConditionalGeneration as DeciLM; expected a language model"
    ):
        gac.export(tmp_path / "saved", tmp_path / "deci", deci=True)
    gac.export(tmp_path / "saved", tmp_path / "merged", merge=True)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged), logits(model))
    assert (tmp_path / "merged/preprocessor_config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("x")


def test_a_missing_processor_is_said(llava: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (llava / "preprocessor_config.json").unlink()
    assert_refused(
        lambda: processor_files(str(llava)), f"the model '{llava}' came without a processor", "processor_config"
    )
    model = gac.compress(llava, allocated(llava), calibration=tiny_text(), progress=False)
    with caplog.at_level(logging.WARNING):
        gac.save(model, tmp_path / "saved")
    assert "saving without a processor" in caplog.text


def test_code_of_a_processor_is_not_copied(llava: Path) -> None:
    code = {"AutoProcessor": "processing.OtherProcessor"}
    (llava / "preprocessor_config.json").write_text(json.dumps({"auto_map": code}))
    assert_refused(
        lambda: processor_files(str(llava)), "preprocessor_config.json of ", "names code of its own", "Other"
    )


def test_a_model_with_code_of_its_own_is_refused(llava: Path) -> None:
    config = json.loads((llava / "config.json").read_text())
    config |= {"model_type": "other_vl", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (llava / "config.json").write_text(json.dumps(config))
    assert_refused(lambda: gac.allocate(llava, 0.7), f"model '{llava}' needs code of its own", "trust_remote_code=True")


def test_a_decoder_of_an_unknown_layout_is_refused(llava: Path) -> None:
    config = json.loads((llava / "config.json").read_text())
    config["text_config"] = {"model_type": "diffllama", "num_hidden_layers": 2}
    (llava / "config.json").write_text(json.dumps(config))
    assert_refused(lambda: gac.allocate(llava, 0.7), "model type 'llava', a multimodal model around a diffllama")


def test_images_keep_the_residual_stream_in_its_basis() -> None:
    model: Any = wrapper_model(wrapper_config("llava"))
    inputs = image_inputs(model)
    before = logits(model, **inputs)
    with rotated(model) as rotation:
        assert not rotation.stream
        torch.testing.assert_close(logits(model, **inputs), before)


def test_no_wrapper_is_a_language_model_too() -> None:
    assert not {*wrappers()} & {*supported()}


def test_embedding_head_and_decoder_in_few_bits(llava: Path, tmp_path: Path) -> None:
    plan = gac.allocate(
        llava, 0.5, schemes=("w8a16", "w4a16:32"), head="w8a16", calibration=tiny_text(), workloads=(), progress=False
    )
    model = gac.compress(llava, plan, calibration=tiny_text(), progress=False)
    gac.save(model, tmp_path / "saved")
    loaded: Any = gac.load(tmp_path / "saved", verify=True)
    inputs = image_inputs(loaded)
    assert torch.equal(logits(loaded, **inputs), logits(model, **inputs))
    vision = AutoModelForImageTextToText.from_pretrained(llava).model.vision_tower.state_dict()
    assert all(torch.equal(values, vision[name]) for name, values in loaded.model.vision_tower.state_dict().items())
