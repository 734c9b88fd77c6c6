"""Tiny random checkpoints as other compressors store them, and what they compute."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gac.models.families import family_of

IDS = torch.arange(40).reshape(2, 20)
Tensors = dict[str, Tensor]
Naming = Callable[[str, Tensor, Tensor], Tensors]


def svd_llm(name: str, second: Tensor, first: Tensor) -> Tensors:
    stem = name.removesuffix("_proj")
    return {f"{stem}_u_proj.weight": second, f"{stem}_v_proj.weight": first}


def asvd(name: str, second: Tensor, first: Tensor) -> Tensors:
    return {f"{name}.ALinear.weight": second, f"{name}.BLinear.weight": first}


def weight_names(config: LlamaConfig) -> list[str]:
    return [weight.name for site in family_of(config).sites(config) for weight in site.weights]


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
    for name, of_groups in ranks.items():
        out, into = tensors.pop(f"{name}.weight").shape
        tensors[f"{name}.VT.weight"] = torch.randn(sum(of_groups), into) / into**0.5
        for group, rank in enumerate(of_groups):
            tensors[f"{name}.U.{group}.weight"] = torch.randn(out // len(of_groups), rank) / rank**0.5
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
    """These tensors with the named key-value heads of some layers alone, each with the query heads that read it."""
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
        if pickled:
            torch.save(shard_tensors, directory / file)
        else:
            save_file(shard_tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": size(tensors)}, "weight_map": weight_map}
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return directory


def size(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def read(directory: Path) -> Tensors:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


class HeadGroups(nn.Module):
    """PaLU's module: latents of all groups, split, each multiplied out by a weight of its own."""

    def __init__(self, latents: Tensor, outputs: list[Tensor]) -> None:
        super().__init__()
        self.latents, self.outputs = latents, outputs

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x @ self.latents.T, [output.shape[1] for output in self.outputs], dim=-1)
        return torch.cat([part @ output.T for part, output in zip(parts, self.outputs, strict=True)], dim=-1)


def logits(directory: Path, config: LlamaConfig) -> Tensor:
    """What a model of this config computes with the tensors of a directory, whatever their layout."""
    model, tensors = LlamaForCausalLM(config).eval().to(next(iter(read(directory).values())).dtype), read(directory)
    for name in weight_names(config):
        stem = name.removesuffix("_proj")
        pairs = [
            (f"{stem}_u_proj.weight", f"{stem}_v_proj.weight"),
            (f"{name}.ALinear.weight", f"{name}.BLinear.weight"),
        ]
        for second, first in pairs:
            if second in tensors:
                model.set_submodule(name, nn.Sequential(linear(tensors[first]), linear(tensors[second])))
        if f"{name}.VT.weight" in tensors:
            groups = [key for key in tensors if re.fullmatch(rf"{re.escape(name)}\.U\.\d+\.weight", key)]
            model.set_submodule(
                name, HeadGroups(tensors[f"{name}.VT.weight"], [tensors[key] for key in sorted(groups)])
            )
        if f"{name}.weight" in tensors:
            model.set_submodule(name, linear(tensors[f"{name}.weight"]))
    kept = {name: tensor for name, tensor in tensors.items() if name in model.state_dict()}
    model.load_state_dict(kept, strict=False)
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def linear(weight: Tensor) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    module.weight = nn.Parameter(weight)
    return module


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.detach().norm())
