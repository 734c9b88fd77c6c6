"""Checkpoints and outputs that repair refuses, without leaving anything behind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import gac
from gac.core.errors import CheckpointError, GacError, ProfileError
from tests.repairs.checkpoints import Tensors, asvd, factored, grouped, narrowed, svd_llm, write

H100 = "nvidia-h100-80gb-hbm3"
QUERY = "model.layers.0.self_attn.q"
KEYS = "model.layers.0.self_attn.k_proj"


def failure(source: Path, **options: object) -> str:
    """The error of ``gac.repair``, which must leave no output."""
    target = source.parent / "ours"
    with pytest.raises(GacError) as caught:
        gac.repair(source, target, **({"profile": H100} | options))
    assert not target.exists()
    assert not list(source.parent.glob(".ours*"))
    return str(caught.value)


@pytest.fixture
def pairs(tiny_model: LlamaForCausalLM) -> Tensors:
    return factored(tiny_model, 13, svd_llm)


@pytest.fixture
def written(tiny_model: LlamaForCausalLM, tmp_path: Path) -> Callable[..., Path]:
    return lambda tensors, **stated: write(tmp_path / "theirs", tiny_model.config, tensors, **stated)


MADE: dict[str, Callable[[LlamaForCausalLM], Tensors]] = {
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
    ("made", "changed", "stated", "words"),
    [
        ("svd", {A: torch.ones(12, 64)}, {}, f"{PRODUCT}{QUERY}_proj."),
        ("svd", {f"{QUERY}_u_proj.weight": torch.ones(60, 13)}, {}, "expected factors that multiply to 64 x 64"),
        ("svd", {A: None}, {}, "expected both factors, as SVD-LLM stores them"),
        ("asvd", {}, OTHER_RANK, f"config.json states rank 12 for {QUERY}_proj; expected 13, as stored."),
        ("groups", {VT: torch.ones(17, 64)}, {}, GROUPS),
        ("groups", {f"{KEYS}.U.0.weight": torch.tensor(1.0)}, {}, "expected factors that multiply to 32 x 64"),
        ("groups", {}, {"head_wise_ranks": {KEYS: 7}}, "expected [11, 7], as stored"),
        ("groups", {}, {"head_wise_ranks": {KEYS: "11, 7"}}, "expected [11, 7], as stored"),
        ("widths", {UP: torch.ones(106, 64)}, {}, "expected weights that share their neurons, and a hidden size of 64"),
        ("widths", {UP: torch.ones(107)}, {}, f"{UP} of shape (107,); expected a matrix."),
    ],
)
def test_tensors_that_contradict_one_another_or_the_config(
    made: str, changed: Tensors, stated: dict[str, object], words: str, tiny_model, written: Callable[..., Path]
) -> None:
    tensors = MADE[made](tiny_model) | changed
    source = written({name: tensor for name, tensor in tensors.items() if tensor is not None}, **stated)
    message = failure(source)
    assert message.startswith(f"{source}: ")
    assert words in message


def test_a_shard_that_is_missing_or_damaged(pairs: Tensors, written: Callable[..., Path]) -> None:
    shard = written(pairs) / "model-00002-of-00002.safetensors"
    shard.write_bytes(b"torn")
    assert "expected a whole safetensors file" in failure(shard.parent)
    shard.unlink()
    assert f"{shard.name} is missing" in failure(shard.parent)


class Evil:
    """Writes a file when it is unpickled by a loader that calls the functions a pickle names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.path, "ran")


def test_pickles_are_read_as_tensors_alone_and_if_allowed(
    pairs: Tensors, written: Callable[..., Path], tmp_path: Path
) -> None:
    source = written(pairs)
    for file in source.glob("model*"):
        file.unlink()
    assert f"{source} has no weights; expected model.safetensors" in failure(source)
    torch.save({"model": pairs, "step": 3}, source / "model.pt")
    assert f"{source / 'model.pt'} holds other things than tensors" in failure(source, allow_pickle=True)
    (source / "model.pt").unlink()
    torch.save({"weight": Evil(tmp_path / "ran")}, source / "pytorch_model.bin")
    assert "expected a state_dict" in failure(source, allow_pickle=True)
    assert not (tmp_path / "ran").exists()
    torch.save(pairs, source / "pytorch_model.bin")
    message = failure(source)
    assert "weights in pytorch_model.bin, a pickle; expected safetensors files. Pass --allow-pickle" in message


def test_nothing_that_repair_knows(written: Callable[..., Path], tmp_path: Path) -> None:
    assert "no such directory; expected a checkpoint's directory" in failure(tmp_path / "none")
    source = written({"encoder.weight": torch.ones(3, 3), "head.weight": torch.ones(3, 3)}, model_type="other")
    message = failure(source)
    assert f"{source} (model_type 'other') has nothing that can be padded; expected pairs of SVD-LLM, pairs" in message
    assert "fewer heads, or a checkpoint of GAC" in message


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("../theirs", "is the input; expected another directory"),
        ("ours", "one is inside the other; expected two separate directories"),
        ("../used", "exists and is no compressed checkpoint; expected a new or empty"),
    ],
)
def test_an_output_in_use(
    output: str, words: str, pairs: Tensors, written: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    source = written(pairs)
    with pytest.raises(CheckpointError, match=words):
        gac.repair(source, source / output, profile=H100, overwrite=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_needs_a_gpu(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs)
    with pytest.raises(ProfileError, match=r"no CUDA device is visible .*; expected an NVIDIA GPU to measure"):
        gac.repair(source, source.parent / "ours", profile=H100, measure=True)
    assert not (source.parent / "ours").exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([1], "holds a list; expected a JSON object"),
        ("[" * 100_000, "cannot be read: "),  # too deep
        ({"hidden_size": "wide"}, "config.json is no config of a llama model: "),
    ],
)
def test_a_config_that_is_invalid(config: object, words: str, pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs, **(config if isinstance(config, dict) else {}))
    if not isinstance(config, dict):
        (source / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert words in failure(source)
