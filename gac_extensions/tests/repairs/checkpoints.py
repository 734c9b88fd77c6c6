"""Tiny random checkpoints as other compressors store them, and their logits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import gac
from gac.core.errors import CheckpointError
from tests.models.small import weights_of

H100 = "nvidia-h100-80gb-hbm3"
IDS = torch.arange(40).reshape(2, 20)
Tensors = dict[str, Tensor]
Naming = Callable[[str, Tensor, Tensor], Tensors]


def svd_llm(name: str, second: Tensor, first: Tensor) -> Tensors:
    stem = name.removesuffix("_proj")
    return {f"{stem}_u_proj.weight": second, f"{stem}_v_proj.weight": first}


def asvd(name: str, second: Tensor, first: Tensor) -> Tensors:
    return {f"{name}.ALinear.weight": second, f"{name}.BLinear.weight": first}


def weight_names(config: LlamaConfig) -> list[str]:
    return [weight.name for weight in weights_of(config)]


def factored(model: LlamaForCausalLM, rank: int, naming: Naming) -> Tensors:
    """The state_dict with every linear weight as two random factors of this rank."""
    torch.manual_seed(1)
    tensors = dict(model.state_dict())
    for name in weight_names(model.config):
        out, into = tensors.pop(f"{name}.weight").shape
        second, first = torch.randn(out, rank) / rank**0.5, torch.randn(rank, into) / into**0.5
        tensors |= naming(name, second, first)
    return tensors


def grouped(model: LlamaForCausalLM, ranks: dict[str, list[int]]) -> Tensors:
    """The state_dict with k_proj and v_proj in groups of heads as PaLU stores them."""
    torch.manual_seed(1)
    tensors = dict(model.state_dict())
    for name, group_ranks in ranks.items():
        out, into = tensors.pop(f"{name}.weight").shape
        tensors[f"{name}.VT.weight"] = torch.randn(sum(group_ranks), into) / into**0.5
        for group, rank in enumerate(group_ranks):
            tensors[f"{name}.U.{group}.weight"] = torch.randn(out // len(group_ranks), rank) / rank**0.5
    return tensors


def narrowed(model: LlamaForCausalLM, widths: list[int]) -> Tensors:
    """The state_dict with the first so many neurons of every layer."""
    tensors = dict(model.state_dict())
    for layer, width in enumerate(widths):
        mlp = f"model.layers.{layer}.mlp"
        for name in ("gate_proj", "up_proj"):
            tensors[f"{mlp}.{name}.weight"] = tensors[f"{mlp}.{name}.weight"][:width].clone()
        tensors[f"{mlp}.down_proj.weight"] = tensors[f"{mlp}.down_proj.weight"][:, :width].clone()
    return tensors


def with_heads(model: PreTrainedModel, kept: dict[int, list[int]], tensors: Tensors) -> Tensors:
    """These tensors with only the named key-value heads of some layers, each with the query heads that read it."""
    changed, config = dict(tensors), model.config
    length = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = config.num_attention_heads // config.num_key_value_heads
    for layer, heads in kept.items():
        sizes = length, shared * length
        rows = {size: torch.cat([torch.arange(size) + head * size for head in heads]) for size in sizes}
        block = f"model.layers.{layer}.self_attn"
        for name, size in (("q_proj", shared * length), ("k_proj", length), ("v_proj", length)):
            for part in ("weight", "bias"):
                if f"{block}.{name}.{part}" in changed:
                    changed[f"{block}.{name}.{part}"] = changed[f"{block}.{name}.{part}"][rows[size]]
        changed[f"{block}.o_proj.weight"] = changed[f"{block}.o_proj.weight"][:, rows[shared * length]]
    return changed


def write(directory: Path, config: LlamaConfig, tensors: Tensors, *, pickled: bool = False, **stated: object) -> Path:
    """A directory as transformers lays it out, in two shards."""
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    directory.mkdir()
    document = config.to_dict() | {"architectures": ["LlamaForCausalLM"]} | stated
    (directory / "config.json").write_text(json.dumps(document))
    (directory / "tokenizer.json").write_text("{}")
    names = sorted(tensors)
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2])):
        file = f"{stem}-0000{shard + 1}-of-00002.{suffix}"
        shard_tensors = {name: tensors[name].contiguous() for name in part}
        (torch.save if pickled else save_file)(shard_tensors, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": size(tensors)}, "weight_map": weight_map}
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return directory


def size(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def read(directory: Path) -> Tensors:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def logits(directory: Path, config: LlamaConfig) -> Tensor:
    """Logits of a model of this config whose weights are multiplied out of the stored factors."""
    tensors = read(directory)
    model = LlamaForCausalLM(config).eval().to(next(iter(tensors.values())).dtype)
    for name in weight_names(config):
        weight = _multiplied(tensors, name)
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        module.weight = nn.Parameter(weight)
        model.set_submodule(name, module)
    same = {name: tensor for name, tensor in tensors.items() if name in model.state_dict()}
    model.load_state_dict(same, strict=False)
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def _multiplied(tensors: Tensors, name: str) -> Tensor:
    for naming in (svd_llm, asvd):
        second, first = naming(name, torch.empty(0), torch.empty(0))
        if second in tensors:
            return _product(tensors[second], tensors[first])
    if f"{name}.VT.weight" not in tensors:
        return tensors[f"{name}.weight"]
    seconds = [tensors[key] for key in sorted(tensors) if key.startswith(f"{name}.U.")]
    latents = tensors[f"{name}.VT.weight"].split([second.shape[1] for second in seconds])
    return torch.cat([_product(second, first) for second, first in zip(seconds, latents, strict=True)])


def _product(second: Tensor, first: Tensor) -> Tensor:
    return (second.double() @ first.double()).to(first.dtype)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def refused(source: Path, error: type[Exception] = CheckpointError, **options: object) -> str:
    """The error of ``gac.repair``, which must leave no output."""
    before = set(source.parent.iterdir())
    with pytest.raises(error) as caught:
        gac.repair(source, source.parent / "ours", **({"profile": H100} | options))
    assert set(source.parent.iterdir()) == before
    return str(caught.value)
