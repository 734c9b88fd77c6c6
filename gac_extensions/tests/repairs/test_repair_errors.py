"""Checkpoints and outputs that repair refuses, without leaving anything behind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import gac
from gac.core.errors import CheckpointError, GacError, ProfileError
from gac_extensions.tests.repairs.checkpoints import (
    H100,
    Tensors,
    asvd,
    factored,
    grouped,
    narrowed,
    refused,
    svd_llm,
    write,
)

QUERY = "model.layers.0.self_attn.q"
KEYS = "model.layers.0.self_attn.k_proj"


@pytest.fixture
def pairs(tiny_model: LlamaForCausalLM) -> Tensors:
    return factored(tiny_model, 13, svd_llm)


@pytest.fixture
def written(tiny_model: LlamaForCausalLM, tmp_path: Path) -> Callable[..., Path]:
    return lambda tensors, **stated: write(tmp_path / "theirs", tiny_model.config, tensors, **stated)


MAKE: dict[str, Callable[[LlamaForCausalLM], Tensors]] = {
    "svd": lambda model: factored(model, 13, svd_llm),
    "asvd": lambda model: factored(model, 13, asvd),
    "groups": lambda model: grouped(model, {KEYS: [11, 7]}),
    "widths": lambda model: narrowed(model, [107, 93]),
}
UP, A, VT = "model.layers.0.mlp.up_proj.weight", f"{QUERY}_v_proj.weight", f"{KEYS}.VT.weight"
PRODUCT = f"{QUERY}_u_proj.weight 64 x 13 times {A} 12 x 64; expected factors that multiply to 64 x 64, the shape of "
GROUPS = f"{KEYS}.U.1.weight 16 x 7 times {VT} 17 x 64; expected factors that multiply to 32 x 64, the shape of {KEYS}"
OTHER_RANK = {"model_type": "asvd_llama", "truncation_ranks": {f"{QUERY}_proj": 12}}


@pytest.mark.parametrize(
    ("layout", "changed", "stated", "words"),
    [
        ("svd", {A: torch.ones(12, 64)}, {}, f"{PRODUCT}{QUERY}_proj."),
        ("svd", {A: None}, {}, "expected both factors, as SVD-LLM stores them"),
        ("asvd", {}, OTHER_RANK, f"config.json states rank 12 for {QUERY}_proj; expected 13, as stored."),
        ("groups", {VT: torch.ones(17, 64)}, {}, GROUPS),
        ("groups", {f"{KEYS}.U.0.weight": torch.tensor(1.0)}, {}, "expected factors that multiply to 32 x 64"),
        ("groups", {}, {"head_wise_ranks": {KEYS: "11, 7"}}, "expected [11, 7], as stored"),
        ("widths", {UP: torch.ones(106, 64)}, {}, "expected weights that share their neurons, and a hidden size of 64"),
        ("widths", {UP: torch.ones(107)}, {}, f"{UP} of shape (107,); expected a matrix."),
    ],
)
def test_contradicting_tensors_and_configs(
    layout: str, changed: Tensors, stated: dict[str, object], words: str, tiny_model, written: Callable[..., Path]
) -> None:
    tensors = MAKE[layout](tiny_model) | changed
    source = written({name: tensor for name, tensor in tensors.items() if tensor is not None}, **stated)
    message = refused(source)
    assert message.startswith(f"{source}: ")
    assert words in message


def test_missing_and_damaged_shards(pairs: Tensors, written: Callable[..., Path]) -> None:
    shard = written(pairs) / "model-00002-of-00002.safetensors"
    shard.write_bytes(b"torn")
    assert "expected a whole safetensors file" in refused(shard.parent)
    shard.unlink()
    assert f"{shard.name} is missing" in refused(shard.parent)


class Evil:
    """Writes a file when it is unpickled by a loader that calls the functions a pickle names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.path, "ran")


def test_pickles(pairs: Tensors, written: Callable[..., Path], tmp_path: Path) -> None:
    source = written(pairs)
    for file in source.glob("model*"):
        file.unlink()
    assert f"{source} has no weights; expected model.safetensors" in refused(source)
    torch.save({"model": pairs, "step": 3}, source / "model.pt")
    assert f"{source / 'model.pt'} holds other things than tensors" in refused(source, allow_pickle=True)
    (source / "model.pt").unlink()
    torch.save({"weight": Evil(tmp_path / "ran")}, source / "pytorch_model.bin")
    assert "expected a state_dict" in refused(source, allow_pickle=True)
    assert not (tmp_path / "ran").exists()
    torch.save(pairs, source / "pytorch_model.bin")
    assert "a pickle; expected safetensors files. Pass --allow-pickle" in refused(source)


def test_unknown_layouts(written: Callable[..., Path], tmp_path: Path) -> None:
    assert "no such directory; expected a checkpoint's directory" in refused(tmp_path / "none")
    source = written({"encoder.weight": torch.ones(3, 3), "head.weight": torch.ones(3, 3)}, model_type="other")
    message = refused(source)
    assert f"{source} (model_type 'other') has nothing that can be padded; expected pairs of SVD-LLM, pairs" in message
    assert "fewer heads, or a checkpoint of GAC" in message


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("../theirs", "is the input .*; expected two separate directories"),
        ("ours", "one is inside the other; expected two separate directories"),
        ("../used", "exists and is no compressed checkpoint; expected a new or empty"),
    ],
)
def test_outputs_in_use(output: str, words: str, pairs: Tensors, written: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    source = written(pairs)
    with pytest.raises(CheckpointError, match=words):
        gac.repair(source, source / output, profile=H100, overwrite=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_needs_a_gpu(pairs: Tensors, written: Callable[..., Path]) -> None:
    message = refused(written(pairs), ProfileError, measure=True)
    assert message.startswith("no CUDA device is visible")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "holds a list; expected a JSON object"),
        ("[" * 100_000, "cannot be read: "),  # too deep
        (json.dumps({"model_type": "llama", "hidden_size": "wide"}), "config.json is no config of a llama model: "),
    ],
)
def test_invalid_configs(text: str, words: str, pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs)
    (source / "config.json").write_text(text)
    assert words in refused(source, GacError)
