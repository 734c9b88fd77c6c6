"""What repair refuses, and that it leaves nothing behind then."""

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
AGAIN = "Save or copy the checkpoint again."


def failure(source: Path, **options: object) -> str:
    """What ``gac.repair`` says; it must leave no output."""
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
AS_STORED = "expected [11, 7], as stored"
PRODUCT = f"{QUERY}_u_proj.weight 64 x 13 times {A} 12 x 64; expected factors that multiply to 64 x 64, the shape of "
UPS = f"{KEYS}.U.0.weight 16 x 11 and {KEYS}.U.1.weight 16 x 7"
GROUPS = f"{UPS} times {VT} 17 x 64; expected factors that multiply to 32 x 64, the shape of "
RANK = f"config.json states rank 12 for {QUERY}_proj; expected 13, as stored."
OTHER_RANK = {"model_type": "asvd_llama", "truncation_ranks": {f"{QUERY}_proj": 12}}


@pytest.mark.parametrize(
    ("made", "changed", "stated", "said"),
    [
        ("svd", {A: torch.ones(12, 64)}, {}, f"{PRODUCT}{QUERY}_proj."),
        ("svd", {f"{QUERY}_u_proj.weight": torch.ones(60, 13)}, {}, "expected factors that multiply to 64 x 64"),
        ("asvd", {}, OTHER_RANK, RANK),
        ("groups", {VT: torch.ones(17, 64)}, {}, f"{GROUPS}{KEYS}."),
        ("groups", {f"{KEYS}.U.0.weight": torch.tensor(1.0)}, {}, "expected factors that multiply to 32 x 64"),
        ("groups", {}, {"head_wise_ranks": {KEYS: 7}}, AS_STORED),
        ("groups", {}, {"head_wise_ranks": {KEYS: "11, 7"}}, AS_STORED),
        ("widths", {UP: torch.ones(106, 64)}, {}, "expected weights that share their neurons, and a hidden size of 64"),
        ("widths", {UP: torch.ones(107)}, {}, f"{UP} of shape (107,); expected a matrix."),
    ],
)
def test_tensors_that_contradict_one_another_or_the_config(
    made: str, changed: Tensors, stated: dict[str, object], said: str, tiny_model, written: Callable[..., Path]
) -> None:
    source = written(MADE[made](tiny_model) | changed, **stated)
    message = failure(source)
    assert message.startswith(f"{source}: ")
    assert said in message
    assert message.endswith(AGAIN)


def test_a_factor_without_the_other(pairs: Tensors, written: Callable[..., Path]) -> None:
    del pairs[f"{QUERY}_v_proj.weight"]
    assert failure(written(pairs)).endswith(f"expected both factors, as SVD-LLM stores them. {AGAIN}")


def test_a_shard_that_is_missing_or_damaged(pairs: Tensors, written: Callable[..., Path]) -> None:
    shard = written(pairs) / "model-00002-of-00002.safetensors"
    shard.write_bytes(b"torn")
    assert "expected a whole safetensors file. Copy the checkpoint again." in failure(shard.parent)
    shard.unlink()
    assert f"{shard.name} is missing; expected every file that was saved." in failure(shard.parent)


def test_a_pickle_needs_the_flag(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = unpacked(written(pairs))
    torch.save(pairs, source / "pytorch_model.bin")
    assert failure(source) == (
        f"{source} has its weights in pytorch_model.bin, a pickle; expected safetensors files. Pass --allow-pickle "
        "(allow_pickle=True) if you trust where it is from; it is read with weights_only=True."
    )


def test_code_in_a_pickle_is_not_run(pairs: Tensors, written: Callable[..., Path], tmp_path: Path) -> None:
    source = unpacked(written(pairs))
    torch.save({"weight": Evil(tmp_path / "ran")}, source / "pytorch_model.bin")
    assert "expected a state_dict: tensors by name, and nothing else" in failure(source, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_of_more_than_tensors(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = unpacked(written(pairs))
    torch.save({"model": pairs, "step": 3}, source / "model.pt")
    assert failure(source, allow_pickle=True) == (
        f"{source / 'model.pt'} holds other things than tensors; expected a state_dict: tensors by name, and nothing "
        "else. Save model.state_dict() alone."
    )


class Evil:
    """Writes a file when it is unpickled by a loader that calls what a pickle names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.path, "ran")


def unpacked(source: Path) -> Path:
    """The directory without its weights."""
    for file in source.glob("model*"):
        file.unlink()
    return source


def test_no_weights(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = unpacked(written(pairs))
    assert failure(source) == (
        f"{source} has no weights; expected model.safetensors, pytorch_model.bin, the index of either, or a single .pt "
        "file of a state_dict. Check the path."
    )


def test_no_directory(tmp_path: Path) -> None:
    assert failure(tmp_path / "none") == (
        f"{tmp_path / 'none'}: no such directory; expected a checkpoint's directory. Check the path."
    )


def test_nothing_that_repair_knows(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written({"encoder.weight": torch.ones(3, 3), "head.weight": torch.ones(3, 3)}, model_type="other")
    assert failure(source) == (
        f"{source} (model_type 'other') has nothing that can be padded; expected pairs of SVD-LLM, pairs of ASVD, head "
        "groups of PaLU, latent attention, MLP widths, fewer heads, or a checkpoint of GAC. Check the names of its "
        "tensors."
    )


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("../theirs", "is the input; expected another directory: the input is never changed"),
        ("ours", "one is inside the other; expected two separate directories"),
        ("../used", "exists and is no compressed checkpoint; expected a new or empty"),
    ],
)
def test_an_output_in_use(output: str, said: str, pairs: Tensors, written: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    source = written(pairs)
    with pytest.raises(CheckpointError, match=said):
        gac.repair(source, source / output, profile=H100, overwrite=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_figures_of_a_gpu_that_is_not_there(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs)
    with pytest.raises(ProfileError, match=r"no CUDA device is visible .*; expected an NVIDIA GPU to measure"):
        gac.repair(source, source.parent / "ours", profile=H100, measure=True)
    assert not (source.parent / "ours").exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (json.dumps([1]), "holds a list; expected a JSON object. Check the path."),
        ("[" * 100_000, "cannot be read: "),  # too deep
    ],
)
def test_a_config_that_is_none(config: str, said: str, pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs)
    (source / "config.json").write_text(config)
    assert failure(source).startswith(f"{source / 'config.json'} {said}")


def test_a_config_of_wrong_types(pairs: Tensors, written: Callable[..., Path]) -> None:
    message = failure(written(pairs, hidden_size="wide"))
    assert message.startswith("config.json is no config of a llama model: ")
    assert message.endswith("; expected its own config. Copy it again.")
