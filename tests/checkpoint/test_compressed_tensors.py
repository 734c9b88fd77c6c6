"""Weights of few bits as compressed-tensors reads them: its config, its tensors and its values."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gac
from gac.core.errors import CheckpointError
from gac.plan.plan import Plan
from gac.runtime.storage.modules import stored_modules
from gac.schemes import scheme_named
from tests.checkpoint.test_three_ways import answers
from tests.compression.applying import IDS
from tests.compression.stored import CHOOSY, SCHEMES, held_bytes, stored, stored_model
from tests.models.small import small_config, small_model, weights_of

compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")

MakePlan = Callable[..., Plan]
Q, OUT = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"
UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
CHOSEN = {
    Q: ("low_rank", 32, "w4a16:16"),
    OUT: ("dense", 64, "w8a8"),
    UP: ("dense", 64, "fp8"),
    DOWN: ("dense", 64, "w3a16:128"),  # of 176 columns
}


def chosen_model(make_plan: MakePlan, chosen: Any = CHOSEN) -> Any:
    config = small_config("llama")
    config.dtype = torch.bfloat16
    return stored(small_model(config), make_plan, chosen)


def dense_in(scheme: str) -> dict[str, tuple[str, int, str]]:
    """Every weight but one, and those that groups do not divide."""
    weights = [one for one in weights_of(small_config("llama"))[1:] if not scheme_named(scheme).ragged(one.in_features)]
    return {one.name: ("dense", min(one.out_features, one.in_features), scheme) for one in weights}


def key_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_bytes())["quantization_config"]


@pytest.fixture
def saved(make_plan: MakePlan, tmp_path: Path) -> Path:
    gac.save(chosen_model(make_plan), tmp_path / "saved")
    return tmp_path / "saved"


# --- the layout -----------------------------------------------------------------------------------------------------


def test_the_key_names_every_module_once(saved: Path, make_plan: MakePlan, tmp_path: Path) -> None:
    key = key_of(saved)
    said = {
        target: (group["format"], group["weights"]["num_bits"], group["weights"]["group_size"])
        for group in key["config_groups"].values()
        for target in group["targets"]
    }
    assert said == {
        f"{Q}.first": ("pack-quantized", 4, 16),
        f"{Q}.second": ("pack-quantized", 4, 16),
        OUT: ("int-quantized", 8, None),
        UP: ("float-quantized", 8, None),
    }
    how = [key[name] for name in ("quant_method", "quantization_status", "format")]
    assert how == ["compressed-tensors", "compressed", "mixed-precision"]
    assert {"lm_head", DOWN, "model.layers.0.self_attn.k_proj"} < set(key["ignore"])
    assert not set(key["ignore"]) & said.keys()
    # Groups that do not divide a matrix are left out, as others cannot read them; GAC can.
    down = gac.load(saved, device="cpu").get_submodule(DOWN)
    assert down.values(torch.float32).isfinite().all()
    gac.save(chosen_model(make_plan, {Q: ("low_rank", 16, "bf16")}), tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_bytes())


def test_the_package_reads_all_values(make_plan: MakePlan, tmp_path: Path) -> None:
    """Of every form and scheme; and where it compresses these values again it writes the same tensors."""
    model = stored_model("llama", make_plan)
    model.save_pretrained(tmp_path)
    tensors, modules = load_file(tmp_path / "model.safetensors"), stored_modules(model)
    assert held_bytes(tensors, model.gac_plan) == model.gac_plan.bytes[0]
    config = quantization.QuantizationConfig.model_validate(key_of(tmp_path))
    formats = set()
    for group in config.config_groups.values():
        compressor = compressors.BaseCompressor.get_value_from_registry(str(group.format))
        formats.add((group.format, group.weights.num_bits, group.weights.strategy == "block"))
        for target in group.targets:
            held = {name: tensors[f"{target}.{name}"] for name in compressor.compression_param_names(group)}
            assert set(held) == set(modules[target].tensors)
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                found = compressor.decompress(held | {"weight_scale": held["weight_scale"].to(dtype)}, group)
                assert torch.equal(found["weight"], modules[target].values(dtype).flatten(0, -2)), target
            again = compressor.compress(found, group)  # type: ignore[possibly-undefined]
            assert all(torch.equal(again[name].to(one.dtype), one) for name, one in held.items()), target
    assert len(formats) == len(SCHEMES) - 2 + len(CHOOSY)  # bf16 has none, nvfp4a16 has one in an export alone


def test_an_export_in_4_bit_floats_holds_the_same_values(make_plan: MakePlan, tmp_path: Path) -> None:
    """NVFP4 has one global scale a block, the reciprocal, for vLLM joins matrices; checkpoints have one a row."""
    model = chosen_model(make_plan, dense_in("nvfp4a16") | {UP: ("dense", 64, "mxfp4a16")})
    larger = model.get_submodule(OUT).weight_global_scale.mul_(4)
    gac.save(model, tmp_path / "saved")
    assert [group["targets"] for group in key_of(tmp_path / "saved")["config_groups"].values()] == [[UP]]
    gac.export(model, tmp_path / "plain", compressed_tensors=True)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    config, targets = quantization.QuantizationConfig.model_validate(key_of(tmp_path / "plain")), set()
    for group in config.config_groups.values():
        compressor = compressors.BaseCompressor.get_value_from_registry(str(group.format))
        for target in group.targets:
            held = {name: tensors.pop(f"{target}.{name}") for name in compressor.compression_param_names(group)}
            found = compressor.decompress(held, group)["weight"]
            assert torch.equal(found, model.get_submodule(target).values(torch.bfloat16)), target
            if target.startswith(OUT.rpartition(".")[0]):
                assert torch.equal(held["weight_global_scale"], 1 / larger[0])
        preset = quantization.preset_name_to_scheme(str(group.format)[:5].upper() + "A16", [])
        assert group.weights.model_dump(exclude={"zp_dtype"}) == preset.weights.model_dump(exclude={"zp_dtype"})
        targets |= {*group.targets}
    assert targets == {*stored_modules(model)}
    assert not [name for name in tensors if name.startswith(tuple(targets))]
    larger *= 2.0**12
    with pytest.raises(CheckpointError, match=r"self_attn: scales of NVFP4 further apart .* Export it without"):
        gac.export(model, tmp_path / "other", compressed_tensors=True)


def test_an_export_in_blocks_is_compressed_tensors_preset(make_plan: MakePlan, tmp_path: Path) -> None:
    """The last block has fewer rows; columns, whose groups of inputs it quantises, are a multiple of 128."""
    config = small_config("llama", hidden_size=256)
    config.dtype = torch.bfloat16
    model = stored(small_model(config), make_plan, {UP: ("dense", 176, "fp8_block")})
    gac.export(model, tmp_path / "plain", compressed_tensors=True)
    (group,) = quantization.QuantizationConfig.model_validate(key_of(tmp_path / "plain")).config_groups.values()
    preset = quantization.preset_name_to_scheme("FP8_BLOCK", [UP])
    assert (group.targets, group.weights, group.input_activations) == ([UP], preset.weights, preset.input_activations)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    compressor = compressors.BaseCompressor.get_value_from_registry(str(group.format))
    held = {name: tensors[f"{UP}.{name}"] for name in compressor.compression_param_names(group)}
    assert {name: tuple(one.shape) for name, one in held.items()} == {"weight": (176, 256), "weight_scale": (2, 2)}
    found = compressor.decompress(held, group)["weight"]
    assert torch.equal(found.bfloat16(), model.get_submodule(UP).values(torch.bfloat16))


# --- plain transformers ---------------------------------------------------------------------------------------------

PLAIN = """
import sys
sys.modules["gac"] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
ids = torch.arange(40).reshape(2, 20)
given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(ids).logits.contiguous()
    save_file({"logits": logits, "tokens": model.generate(ids, **given)}, folder + "-output")
    assert type(model).__name__ == "LlamaForCausalLM"
"""


@pytest.mark.slow
def test_an_export_opens_without_gac_and_without_code(make_plan: MakePlan, tmp_path: Path) -> None:
    """The same function where inputs are not quantised; that package quantises them in scales of its own."""
    tolerances = {"w8a16": 0.0, "nvfp4a16": 0.0, "mxfp4a16": 0.0, "fp8": 0.1, "fp8_block": 0.1}
    models = {scheme: chosen_model(make_plan, dense_in(scheme)) for scheme in tolerances}
    for scheme, model in models.items():
        gac.export(model, tmp_path / scheme, compressed_tensors=True)
    subprocess.run([sys.executable, "-c", PLAIN, *(str(tmp_path / scheme) for scheme in models)], check=True)
    for scheme, tolerance in tolerances.items():
        output, expected = load_file(tmp_path / f"{scheme}-output"), answers(models[scheme], IDS)
        assert (output["logits"] - expected["logits"]).abs().max() <= tolerance * expected["logits"].abs().max()
        assert tolerance or torch.equal(output["tokens"], expected["tokens"])


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({Q: ("low_rank", 32, "w4a16:16")}, r"q_proj is low_rank with dim 32, LowRankLinear.*a stock config can say"),
        ({UP: ("dense", 64, "w4a16:48")}, r"up_proj in w4a16:48, a Linear of 64 columns; expected groups that divide"),
        (
            {DOWN: ("dense", 64, "mxfp4a16")},
            r"down_proj in mxfp4a16, a Linear of 176 columns; expected groups that div",
        ),
        (
            {UP: ("dense", 64, "fp8_block")},
            r"up_proj in fp8_block, a Linear of 64 columns; expected groups that divide",
        ),
        ({UP: ("dense", 64, "bf16")}, r"a plan in bf16; expected weights of few bits\. Export it without"),
    ],
)
def test_what_cannot_be_exported_so(chosen: Any, message: str, make_plan: MakePlan, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        gac.export(chosen_model(make_plan, chosen), tmp_path / "plain", compressed_tensors=True)
    with pytest.raises(CheckpointError, match="merge and compressed_tensors; expected one of them"):
        gac.export(chosen_model(make_plan, chosen), tmp_path / "plain", merge=True, compressed_tensors=True)
    assert not list(tmp_path.iterdir())
