"""A repaired checkpoint computes what the original does, in every layout."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaForCausalLM, PreTrainedConfig

import gac
from gac.models.families import family_of
from gac_extensions.repairs.contract import STRATEGIES
from gac_extensions.repairs.report import PaddedDim, RepairResult
from gac_extensions.tests.repairs.checkpoints import (
    H100,
    Naming,
    Tensors,
    asvd,
    factored,
    grouped,
    logits,
    narrowed,
    read,
    relative,
    size,
    svd_llm,
    weight_names,
    write,
)
from tests.models.small import TWO_KINDS, every_layout, small_config, small_model

RANK = 13
KEYS, VALUES = "model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.v_proj"
LIMITS: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture
def repaired(tiny_model: LlamaForCausalLM, tmp_path: Path) -> Callable[..., RepairResult]:
    """Repairs tensors, and checks that the logits stay the same."""

    def repair(tensors: Tensors, dtype: torch.dtype = torch.float32, **stated: object) -> RepairResult:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        source = write(tmp_path / "theirs", tiny_model.config, tensors, **stated)
        result = gac.repair(source, tmp_path / "ours", profile=H100)
        ours, theirs = (logits(tmp_path / place, tiny_model.config) for place in ("ours", "theirs"))
        assert relative(ours, theirs) < LIMITS[dtype]
        return result

    return repair


@pytest.mark.parametrize(("naming", "dtype"), [(svd_llm, torch.float32), (asvd, torch.bfloat16)])
def test_pairs(naming: Naming, dtype: torch.dtype, tiny_model: LlamaForCausalLM, tmp_path: Path, repaired) -> None:
    stated = dict.fromkeys(weight_names(tiny_model.config), RANK)
    repaired(factored(tiny_model, RANK, naming), dtype, model_type="asvd_llama", truncation_ranks=stated)
    ranks = json.loads((tmp_path / "ours" / "config.json").read_bytes())["truncation_ranks"]
    assert set(ranks.values()) == {16 if naming is asvd else RANK}
    second, first = naming("", *[torch.zeros(1)] * 2)
    factors = [tensor for name, tensor in read(tmp_path / "ours").items() if name.endswith((second, first))]
    assert {min(factor.shape) for factor in factors} == {16}


def test_head_groups(tiny_model: LlamaForCausalLM, tmp_path: Path, repaired) -> None:
    ranks = {KEYS: [11, 7], VALUES: [8, 13]}
    result = repaired(grouped(tiny_model, ranks), torch.bfloat16, model_type="palullama", head_wise_ranks=ranks)
    assert result.layouts == ("head groups of PaLU", "MLP widths")
    config = json.loads((tmp_path / "ours" / "config.json").read_bytes())
    assert config["head_wise_ranks"] == {KEYS: [16, 8], VALUES: [8, 16]}
    groups = 2 * 2  # of two weights, each with a GEMM; the latents of a weight are one GEMM more
    assert result.times[0].gemms == groups + 2 + 3 * 2


def test_pruned_widths(tiny_model: LlamaForCausalLM, repaired) -> None:
    moved = repaired(narrowed(tiny_model, [107, 93])).moved
    layers = [("model.layers.0.mlp", 107, 112), ("model.layers.1.mlp", 93, 96)]
    assert [(dim.name, dim.dim, dim.becomes) for dim in moved] == layers


def check_same(config: PreTrainedConfig, stated: str, padded: int, tmp_path: Path) -> None:
    """Check a saved transformers model: the same logits after repair, and the dim that its config states padded."""
    model, ids = small_model(config), torch.arange(20)[None]
    model.save_pretrained(tmp_path / "theirs")
    gac.repair(tmp_path / "theirs", tmp_path / "ours", profile=H100)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert getattr(ours.config, stated) == padded
    assert relative(ours(ids).logits, model(ids).logits) < 1e-5


@every_layout
def test_widths_of_every_layout(model_type: str, tmp_path: Path) -> None:
    if model_type in TWO_KINDS:
        pytest.skip("layers of two kinds are not repaired")
    config = small_config(model_type)
    neurons = family_of(config).neurons
    setattr(config, neurons, 107)
    check_same(config, neurons, 112, tmp_path)


def test_value_heads_of_latent_attention(tmp_path: Path) -> None:
    sizes = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    ranks = {"kv_lora_rank": 24, "q_lora_rank": None, "v_head_dim": 13, "first_k_dense_replace": 2}
    check_same(DeepseekV3Config(**sizes, **heads, **ranks), "v_head_dim", 16, tmp_path)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "profile"])
def test_repairing_twice_changes_nothing(strategy: str, tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    source = write(tmp_path / "theirs", tiny_model.config, factored(tiny_model, RANK, asvd))
    first = gac.repair(source, tmp_path / "once", strategy=strategy, profile=H100)
    second = gac.repair(tmp_path / "once", tmp_path / "twice", strategy=strategy, profile=H100)
    assert first.moved or strategy == "tradeoff"
    assert not second.moved
    assert files(tmp_path / "once") == files(tmp_path / "twice")


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_only_zeros_are_added_and_other_files_are_copied(tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    tensors = factored(tiny_model, RANK, svd_llm)
    source = write(tmp_path / "theirs", tiny_model.config, tensors)
    (source / "training_args.bin").write_bytes(b"a pickle")
    for folder in ("assets", "state.pt"):
        (source / folder).mkdir()
    (source / "assets" / "code.py").write_text("")
    (source / "assets" / "words.txt").write_text("a b")
    before = {file.name: file.read_bytes() for file in source.iterdir() if file.is_file()}
    result = gac.repair(source, tmp_path / "ours", profile=H100)
    assert result.left_out == ("state.pt", "training_args.bin")
    assert {file.name for file in (tmp_path / "ours").iterdir()} == (before.keys() | {"assets"}) - {"training_args.bin"}
    assert files(tmp_path / "ours" / "assets") == {"words.txt": b"a b"}
    assert {file.name: file.read_bytes() for file in source.iterdir() if file.is_file()} == before
    ours = read(tmp_path / "ours")
    for name, tensor in tensors.items():
        rows, columns = (*tensor.shape, 1)[:2]
        padded = ours[name].reshape(ours[name].shape[0], -1)
        assert torch.equal(padded[:rows, :columns], tensor.reshape(rows, -1))
        assert padded.count_nonzero() == tensor.count_nonzero()
    assert PaddedDim("model.layers.0.mlp.down_proj", 13, 16, 3 * (64 + 176) * 4) in result.moved
    assert result.dims == len(result.moved) == len(weight_names(tiny_model.config))
    assert (result.bytes_before, result.bytes_after) == (size(tensors), size(ours))
    assert result.added_bytes == sum(dim.added_bytes for dim in result.moved)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == result.bytes_after


@pytest.mark.parametrize("shards", [1, 2])
def test_pickled_weights_become_safetensors(shards: int, tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    tensors = factored(tiny_model, RANK, svd_llm)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    source = write(tmp_path / "theirs", tiny_model.config, tensors, pickled=True)
    if shards == 1:  # in the older of PyTorch's formats
        for file in source.glob("pytorch_model*"):
            file.unlink()
        torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    result = gac.repair(source, tmp_path / "ours", profile=H100, allow_pickle=True)
    assert result.left_out == ()
    assert not list((tmp_path / "ours").glob("*.bin*"))
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists() == (shards > 1)
    assert read(tmp_path / "ours").keys() == tensors.keys()
    write(tmp_path / "safe", tiny_model.config, {name: tensor.clone() for name, tensor in tensors.items()})
    assert relative(logits(tmp_path / "ours", tiny_model.config), logits(tmp_path / "safe", tiny_model.config)) < 1e-5
