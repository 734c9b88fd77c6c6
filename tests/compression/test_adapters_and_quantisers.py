"""LoRA on the factors, and factors in 8 and 4 bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import gac
from gac.runtime.modules import ValueLinear
from tests.compression.applying import logits, losses_of_three_steps
from tests.compression.compressed import MakePlan, compressed, small_compressed
from tests.models.small import small_config, small_model, weights_of

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def lora() -> Any:
    return pytest.importorskip("peft", exc_type=ImportError)


def on_the_factors(lora: Any, model: Any, **options: Any) -> Any:
    return lora.get_peft_model(model, lora.LoraConfig(r=4, target_modules=["first", "second"], **options))


def test_a_lora_step_on_the_factors_lowers_the_loss(lora: Any, make_plan: MakePlan) -> None:
    torch.manual_seed(0)
    model = small_compressed("llama", make_plan)
    adapted = on_the_factors(lora, model)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * (7 + 1)  # A and B, first and second, of a layer's weights and of one of the next
    losses = losses_of_three_steps(adapted)
    assert losses[0] > losses[1] > losses[2]


def test_adapters_are_saved_alone_and_merged(lora: Any, make_plan: MakePlan, tmp_path: Path) -> None:
    small_compressed("llama", make_plan).save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    adapted = on_the_factors(lora, loaded, init_lora_weights=False)
    adapted.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")), logits(adapted))
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(gac.load(tmp_path / "merged")), logits(merged))


def correlation(first: Any, second: Any) -> float:
    """Between the logits of two models."""
    return float(torch.corrcoef(torch.stack([logits(model).flatten().float() for model in (first, second)]))[0, 1])


def low_rank(make_plan: MakePlan) -> Any:
    """Every rank a multiple of the group of 64 in which 4-bit weights share a scale."""
    config = small_config("llama")
    config.intermediate_size = 192
    return compressed(small_model(config), make_plan, {weight.name: ("low_rank", 64) for weight in weights_of(config)})


@pytest.mark.parametrize("bits", [8, 4])
def test_torchao_quantises_the_factors(bits: int, make_plan: MakePlan, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    scheme = quantization.Int8WeightOnlyConfig()
    if bits == 4:  # not Int4WeightOnlyConfig, whose kernels need a GPU
        groups = quantization.granularity.PerGroup(64)
        scheme = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups)
    model = low_rank(make_plan)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=TorchAoConfig(scheme))
    second = loaded.get_submodule(Q_PROJ).second.weight
    assert type(second) is not torch.nn.Parameter
    assert 0.8 < correlation(loaded, model) < 1


def in_bits(model: Any, place: Path, bits: str) -> Any:
    """The model as bitsandbytes reads it from its directory."""
    pytest.importorskip("bitsandbytes")
    model.save_pretrained(place)
    scheme = BitsAndBytesConfig(**{bits: True})
    return AutoModelForCausalLM.from_pretrained(place, quantization_config=scheme, device_map="cpu")


@pytest.mark.parametrize(("bits", "layer"), [("load_in_8bit", "Linear8bitLt"), ("load_in_4bit", "Linear4bit")])
def test_bitsandbytes_quantises_the_factors(bits: str, layer: str, make_plan: MakePlan, tmp_path: Path) -> None:
    model = low_rank(make_plan)
    loaded = in_bits(model, tmp_path / "saved", bits)
    assert type(loaded.get_submodule(Q_PROJ).second).__name__ == layer
    assert 0.8 < correlation(loaded, model) < 1


def test_in_8_bits_shorter_values_stay_as_they_are_and_all_can_be_saved(make_plan: MakePlan, tmp_path: Path) -> None:
    model = small_compressed("llama", make_plan)
    loaded = in_bits(model, tmp_path / "saved", "load_in_8bit")
    assert type(loaded.get_submodule("model.layers.1.self_attn.v_proj")) is ValueLinear
    assert 0.8 < correlation(loaded, model) < 1
    loaded.save_pretrained(tmp_path / "quantised")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", device_map="cpu")
    assert torch.equal(logits(again), logits(loaded))
