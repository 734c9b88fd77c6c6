"""What repair refuses, and that it leaves nothing behind then."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import gac
from gac.errors import CheckpointError, GacError, ProfileError
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


def test_factors_of_two_ranks(pairs: Tensors, written: Callable[..., Path]) -> None:
    pairs[f"{QUERY}_v_proj.weight"] = torch.ones(12, 64)
    source = written(pairs)
    assert failure(source) == (
        f"{source}: {QUERY}_u_proj.weight 64 x 13 times {QUERY}_v_proj.weight 12 x 64; "
        f"expected factors that multiply to 64 x 64, the shape of {QUERY}_proj. {AGAIN}"
    )


def test_factors_of_another_shape_than_the_config_states(pairs: Tensors, written: Callable[..., Path]) -> None:
    pairs[f"{QUERY}_u_proj.weight"] = torch.ones(60, 13)
    assert "expected factors that multiply to 64 x 64" in failure(written(pairs))


def test_a_factor_without_the_other(pairs: Tensors, written: Callable[..., Path]) -> None:
    del pairs[f"{QUERY}_v_proj.weight"]
    source = written(pairs)
    assert failure(source) == (
        f"{source}: {QUERY}_u_proj.weight without {QUERY}_v_proj.weight; "
        f"expected both factors, as SVD-LLM stores them. {AGAIN}"
    )


def test_a_rank_that_the_config_states_otherwise(tiny_model: LlamaForCausalLM, written: Callable[..., Path]) -> None:
    source = written(factored(tiny_model, 13, asvd), model_type="asvd_llama", truncation_ranks={f"{QUERY}_proj": 12})
    assert failure(source) == (
        f"{source}: config.json states rank 12 for {QUERY}_proj; expected 13, as it is stored. {AGAIN}"
    )


def test_head_groups_that_do_not_add_up(tiny_model: LlamaForCausalLM, written: Callable[..., Path]) -> None:
    tensors = grouped(tiny_model, {KEYS: [11, 7]})
    tensors[f"{KEYS}.VT.weight"] = torch.ones(17, 64)
    source = written(tensors)
    assert failure(source) == (
        f"{source}: {KEYS}.U of 16 x 11 and 16 x 7 times {KEYS}.VT.weight 17 x 64; "
        f"expected factors that multiply to 32 x 64, the shape of {KEYS}. {AGAIN}"
    )


def test_neurons_that_do_not_meet(tiny_model: LlamaForCausalLM, written: Callable[..., Path]) -> None:
    tensors = narrowed(tiny_model, [107, 93])
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(106, 64)
    assert "expected weights that share their neurons, and a hidden size of 64" in failure(written(tensors))


def test_a_shard_that_is_missing(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs)
    (source / "model-00002-of-00002.safetensors").unlink()
    assert failure(source) == (
        f"{source}: model-00002-of-00002.safetensors is missing; expected every file that was saved. "
        "Save or copy the model again."
    )


def test_a_shard_that_is_damaged(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs)
    (source / "model-00002-of-00002.safetensors").write_bytes(b"torn")
    assert "expected a whole safetensors file. Copy the checkpoint again." in failure(source)


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
        "groups of PaLU, latent attention, MLP widths, or a checkpoint of GAC. Check the names of its tensors."
    )


def test_the_input_is_never_the_output(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs)
    with pytest.raises(CheckpointError) as caught:
        gac.repair(source, source / ".." / source.name, profile=H100, overwrite=True)
    assert str(caught.value) == (
        f"the output {source / '..' / source.name} is the input; expected another directory: the input is never "
        "changed. Choose another one."
    )


def test_the_output_is_not_in_the_input(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs)
    with pytest.raises(CheckpointError, match="one is inside the other; expected two separate directories"):
        gac.repair(source, source / "ours", profile=H100)


def test_an_output_in_use(pairs: Tensors, written: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is no compressed checkpoint; expected a new or empty"):
        gac.repair(written(pairs), tmp_path / "used", profile=H100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_figures_of_a_gpu_that_is_not_there(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs)
    with pytest.raises(ProfileError, match=r"no CUDA device is visible .*; expected an NVIDIA GPU to measure"):
        gac.repair(source, source.parent / "ours", profile=H100, measure=True)
    assert not (source.parent / "ours").exists()


def test_a_config_that_is_none(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs)
    (source / "config.json").write_text(json.dumps([1]))
    assert failure(source) == f"{source / 'config.json'} holds a list; expected a JSON object. Check the path."


def test_a_config_of_wrong_types(pairs: Tensors, written: Callable[..., Path]) -> None:
    message = failure(written(pairs, hidden_size="wide"))
    assert message.startswith("config.json is no config of a llama model: ")
    assert message.endswith("; expected its own config. Copy it again.")


def test_a_config_that_is_too_deep(pairs: Tensors, written: Callable[..., Path]) -> None:
    source = written(pairs)
    (source / "config.json").write_text("[" * 100_000)
    assert failure(source).startswith(f"{source / 'config.json'} cannot be read: ")


def test_neurons_in_a_vector(tiny_model: LlamaForCausalLM, written: Callable[..., Path]) -> None:
    tensors = narrowed(tiny_model, [107, 93])
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(107)
    source = written(tensors)
    assert failure(source) == (
        f"{source}: model.layers.0.mlp.up_proj.weight of shape (107,); expected a matrix. {AGAIN}"
    )


def test_a_head_group_that_is_a_number(tiny_model: LlamaForCausalLM, written: Callable[..., Path]) -> None:
    tensors = grouped(tiny_model, {KEYS: [11, 7]})
    tensors[f"{KEYS}.U.0.weight"] = torch.tensor(1.0)
    assert "expected factors that multiply to 32 x 64" in failure(written(tensors))


@pytest.mark.parametrize("stated", [{KEYS: 7}, {KEYS: "11, 7"}])
def test_ranks_of_head_groups_that_the_config_states_otherwise(
    tiny_model: LlamaForCausalLM, written: Callable[..., Path], stated: object
) -> None:
    source = written(grouped(tiny_model, {KEYS: [11, 7]}), head_wise_ranks=stated)
    assert "expected [11, 7], as they are stored" in failure(source)
