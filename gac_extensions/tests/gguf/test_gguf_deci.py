"""Compressed models as GGUF files of DeciLM: sizes by layer, the tensors of the exported model, and what is refused."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

import gac
from gac.core.errors import CheckpointError
from gac_extensions.gguf.tensors import interleaved
from tests.checkpoint.exported import words
from tests.checkpoint.test_deci import LENGTH, MakePlan, config_alone, exported, varied
from tests.compression.compressed import compressed
from tests.models.small import small_config, small_model, weights_of


def in_file(model: Any, file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    gac.export_gguf(model, file, deci=True, tokenizer=words())
    reader = gguf.GGUFReader(file)
    header = {name.removeprefix("deci."): field.contents() for name, field in reader.fields.items()}
    return header, {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}


def test_a_gguf_file_has_the_sizes_of_every_layer(make_plan: MakePlan, tmp_path: Path) -> None:
    header, tensors = in_file(varied("mistral", make_plan), tmp_path / "deci.gguf")
    assert header["general.architecture"] == "deci"
    assert header["block_count"] == 6
    assert header["feed_forward_length"] == [128, 97, 0, 176, 48, 1]
    assert header["attention.head_count"] == [8, 8, 0, 0, 8, 8]
    assert header["attention.head_count_kv"] == [4, 1, 0, 0, 4, 4]
    assert header["attention.key_length"] == LENGTH
    shapes = {name: tuple(value.shape) for name, value in tensors.items() if name.startswith("blk.1.")}
    assert shapes == {
        "blk.1.attn_norm.weight": (256,),
        "blk.1.attn_q.weight": (256, 256),
        "blk.1.attn_k.weight": (LENGTH, 256),
        "blk.1.attn_v.weight": (LENGTH, 256),
        "blk.1.attn_output.weight": (256, 256),
        "blk.1.ffn_norm.weight": (256,),
        "blk.1.ffn_gate.weight": (97, 256),
        "blk.1.ffn_up.weight": (97, 256),
        "blk.1.ffn_down.weight": (256, 97),
        "blk.1.ffn_down.bias": (256,),
    }
    assert not [name for name in tensors if name.startswith("blk.2.")]
    assert {name for name in tensors if name.startswith("blk.3.")} == {
        f"blk.3.ffn_{name}.weight" for name in ("norm", "gate", "up", "down")
    }


def test_a_gguf_file_has_the_same_numbers(make_plan: MakePlan, tmp_path: Path) -> None:
    model = varied("mistral", make_plan)
    _, state = exported(model, tmp_path / "deci")
    _, tensors = in_file(model, tmp_path / "deci.gguf")
    for name, ours in (
        ("blk.4.ffn_down.weight", "layers.4.mlp.down_proj"),
        ("blk.0.attn_v.weight", "layers.0.self_attn.v_proj"),
    ):
        assert torch.equal(tensors[name], state[f"model.{ours}.weight"])
    queries = state["model.layers.4.self_attn.q_proj.weight"]
    assert torch.equal(tensors["blk.4.attn_q.weight"], interleaved(LENGTH, queries))
    assert torch.equal(tensors["blk.5.attn_output.bias"], state["model.layers.5.self_attn.o_proj.bias"])
    assert [tuple(tensors[f"blk.5.ffn_{name}.weight"].shape) for name in ("gate", "up", "down")] == [
        (1, 256),
        (1, 256),
        (256, 1),
    ]
    assert not any(tensors[f"blk.5.ffn_{name}.weight"].any() for name in ("gate", "up", "down"))


def test_the_last_layer_of_a_gguf_file_has_an_mlp(make_plan: MakePlan, tmp_path: Path) -> None:
    config = small_config("llama")
    chosen = {weight.name: ("skip", 0) for weight in weights_of(config) if ".1." in weight.name}
    header, tensors = in_file(compressed(small_model(config), make_plan, chosen), tmp_path / "deci.gguf")
    assert (header["feed_forward_length"], header["attention.head_count_kv"]) == ([176, 1], [2, 0])
    assert tensors["blk.1.ffn_down.weight"].shape == (64, 1)


def test_biases_of_queries_have_the_size_that_the_loader_expects(make_plan: MakePlan, tmp_path: Path) -> None:
    assert in_file(varied("qwen2", make_plan), tmp_path / "deci.gguf")[1]["blk.4.attn_q.bias"].shape == (256,)
    model = config_alone("llama", make_plan, attention_bias=True)
    message = "model.layers.0.self_attn.q_proj.bias of 128 numbers; expected 64, as llama.cpp reads it"
    with pytest.raises(CheckpointError, match=message):
        in_file(model, tmp_path / "other.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["deci.gguf"]


def test_a_scaled_rotation_has_no_key_in_a_gguf_file(make_plan: MakePlan, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config with rope_type 'llama3'; expected 'default'"):
        in_file(varied("llama", make_plan), tmp_path / "deci.gguf")
