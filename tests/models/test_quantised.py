"""Quantised checkpoints are read as the weights that they stand for, bit for bit, or refused by method and tensor."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gac.models.loading import Loaded, load_model
from tests.changed import edited
from tests.refused import assert_refused

Convert = Callable[[str, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""From the name and the values of a weight to the values that are stored, and the tensors that store them."""
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def in_blocks(name: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.rand(rows, columns) / 100 + 0.001
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
    stored = (weight.float() / wide).to(torch.float8_e4m3fn)
    return stored.float() * wide, {name: stored, f"{name}_scale_inv": scales}


def by_tensor(name: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    scale = weight.abs().max().float() / 448
    stored = (weight.float() / scale).to(torch.float8_e4m3fn)
    return stored.float() * scale, {name: stored, f"{name}_scale_inv": scale}


def in_int8(name: str, weight: Tensor, dtype: torch.dtype = torch.int8, most: int = 127) -> Any:
    """With a scale for each row."""
    scales = (weight.abs().amax(1, keepdim=True).float() / most).bfloat16()
    units = weight.float() / scales.float()
    stored = (units if dtype.is_floating_point else units.round().clamp(-128, 127)).to(dtype)
    return stored.float() * scales.float(), {name: stored, f"{name}_scale": scales}


def by_row(name: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    values, tensors = in_int8(name, weight, torch.float8_e4m3fn, 448)
    return values, tensors | {name.replace("weight", "input_scale"): torch.ones(1)}


def in_int4(name: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    grouped = weight.float().unflatten(1, (-1, 64))
    scales = (grouped.abs().amax(-1, keepdim=True) / 7).bfloat16()
    numbers = (grouped / scales.float()).round().clamp(-8, 7)
    digits = (numbers.flatten(1).long() + 8).unflatten(1, (-1, 8))
    words = (digits << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).int()
    tensors = {f"{name}_packed": packed, f"{name}_scale": scales.squeeze(-1)}
    return (numbers * scales.float()).flatten(1), tensors | {f"{name}_shape": torch.tensor(weight.shape)}


def without_scale(name: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return weight, {name: weight.to(torch.float8_e4m3fn)}


def as_gptq(name: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    stem = name.removesuffix("weight")
    return weight, {f"{stem}qweight": torch.zeros(16, 128, dtype=torch.int32), f"{stem}scales": torch.ones(1, 128)}


def as_it_is(name: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return weight, {name: weight}


def compressed_tensors(layout: str, schemes: int = 1, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights, "format": layout}
    groups = {f"group_{number}": scheme for number in range(schemes)}
    stated = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}
    return stated | {"quantization_status": "compressed"}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
FLOAT8 = compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel")
INT8 = compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel")
INT4 = compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64)
TRANSFORMED = INT8 | {"transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": []}}}}
INT4_TWICE = compressed_tensors("pack-quantized", 2, num_bits=4, type="int", strategy="group", group_size=64)


Quantised = Callable[..., dict[str, Tensor]]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Loaded]:
    return partial(load_model, tmp_path, device="cpu", dequantise=True)


@pytest.fixture
def quantised(tmp_path: Path) -> Quantised:
    """Write a quantised checkpoint to ``tmp_path``, and give the weights that it stands for."""

    def write(stated: Any, convert: Convert, neurons: int = 256) -> dict[str, Tensor]:
        torch.manual_seed(0)
        sizes = {"vocab_size": 258, "hidden_size": 128, "intermediate_size": neurons, "num_hidden_layers": 1}
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).bfloat16().save_pretrained(tmp_path)
        expected, stored = {}, {}
        for name, weight in load_file(tmp_path / "model.safetensors").items():
            values, tensors = (convert if name.endswith("proj.weight") else as_it_is)(name, weight)
            expected[name] = values.bfloat16()
            stored |= tensors
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        with edited(tmp_path / "config.json") as config:
            config |= {"quantization_config": stated} if stated else {}
        return expected

    return write


@pytest.mark.parametrize(
    ("stated", "convert", "neurons"),
    [
        (BLOCKS, in_blocks, 256),
        (BLOCKS, in_blocks, 384),
        (BLOCKS, in_blocks, 64),  # less than one block
        (BLOCKS | {"weight_block_size": None}, by_tensor, 256),
        (FLOAT8, by_row, 256),
        (INT8, in_int8, 256),
        (INT4, in_int4, 256),
    ],
)
def test_the_weights_it_stands_for_are_read(
    stated: Any, convert: Convert, neurons: int, quantised: Quantised, read: Callable[..., Loaded], caplog: Any
) -> None:
    pytest.importorskip("compressed_tensors")
    expected = quantised(stated, convert, neurons)
    with caplog.at_level("INFO", "gac"):
        model = read().model
    weights = model.state_dict()
    assert weights.keys() == expected.keys()
    assert [name for name, values in expected.items() if not torch.equal(weights[name], values)] == []
    assert getattr(model.config, "quantization_config", None) is None
    assert caplog.text.count("its weights are dequantised as they are read") == 1


@pytest.mark.parametrize(
    ("stated", "convert", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, as_it_is, "is quantised: awq, bits 4; expected weights in 16 or 32 bits"),
        ({"quant_method": "gptq", "bits": 4}, as_gptq, "is quantised: gptq, bits 4"),
        (MODELOPT | {"producer": {"name": "modelopt", "version": "0.29"}}, by_row, "FP8, by modelopt 0.29"),
        ({"bits": 3}, as_it_is, "is quantised: by an unnamed method, bits 3"),
        (INT4_TWICE, in_int4, "format pack-quantized, 2 schemes"),
        (INT8 | {"config_groups": 3}, in_int8, "format int-quantized, 0 schemes"),
        (TRANSFORMED, in_int8, "format int-quantized, 1 schemes, inputs that are transformed (transform_config)"),
        (BLOCKS, without_scale, "down_proj.weight in F8_E4M3, without a scale"),
        (None, by_row, "down_proj.weight in F8_E4M3, has 14 tensors of scales, and no config says how"),
        (None, as_gptq, "down_proj.qweight in I32"),
    ],
)
def test_anything_else_is_refused_by_name(
    stated: Any, convert: Convert, message: str, quantised: Quantised, read: Callable[..., Loaded]
) -> None:
    quantised(stated, convert)
    assert_refused(read, "", message, "Use the checkpoint that it was made from.")


def test_blocks_that_do_not_divide_a_weight_are_refused(quantised: Quantised, read: Callable[..., Loaded]) -> None:
    quantised(BLOCKS, in_blocks, 320)
    assert_refused(read, "", "in blocks; expected a multiple of (128, 128)")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "is quantised: modelopt, quant_algo FP8"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "is quantised: gptq, bits 4"),
        ("quant_config.json", {"w_bit": 4, "version": "GEMM"}, "is quantised: awq, w_bit 4, version GEMM"),
    ],
)
def test_a_file_beside_the_config_says_so_too(
    name: str, content: Any, message: str, quantised: Quantised, read: Callable[..., Loaded], tmp_path: Path
) -> None:
    quantised(None, as_it_is)
    (tmp_path / name).write_text(json.dumps(content))
    assert_refused(read, "", message)


@pytest.mark.parametrize(
    ("stated", "convert", "parts"),
    [
        (MODELOPT, by_row, ("has model.layers.0.mlp.down_proj.input_scale, ", "(14 such tensors, 14 of scales")),
        (["fp8"], in_blocks, ("quantization_config is ['fp8'], and not an object",)),
    ],
)
def test_what_transformers_ignores_or_cannot_read_is_refused_for_evaluation_too(
    stated: Any, convert: Convert, parts: tuple[str, ...], quantised: Quantised, read: Callable[..., Loaded]
) -> None:
    quantised(stated, convert)
    assert_refused(partial(read, dequantise=False), "", *parts)


def test_weights_of_8_bits_in_pickles_are_refused(
    quantised: Quantised, read: Callable[..., Loaded], tmp_path: Path
) -> None:
    quantised(None, without_scale)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    message = "weight in float8_e4m3fn, has 0 tensors of scales, and no config says how"
    assert_refused(partial(read, dequantise=False), "", message)
