"""A packaged model off its grid: the same function by other weights, written as an ordinary directory.

    python tests/benchmarks/rotated.py smollm2 rotated-smollm2
    python tests/benchmarks/rotated.py smollm2 permuted-smollm2 --permuted

The weights of the packaged SmolLM2 lie on a 4-bit grid in groups of 32, so that rounding them to 4 bits proves nothing.
Rotated, with gains folded, they lie on no grid; the head stops being tied. Permuted, their features, neurons and values
have another order: a group mixes the grids of many, and a feature that stands out still does. So it is on the permuted
model that one measures what ``rotate=True`` gives. The largest difference of logits is printed, in float32 and as
stored in bfloat16.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gac.models.families import family_of
from gac.models.loading import load_model
from gac.models.rotation import rotate

SEED = 1
"""Not that of ``rotate=True``, which rotates another way."""
GROUP = 32
LEVELS = 15
EVERY = slice(None)
TEXT = (
    "The capital of France is Paris. Water boils at a lower temperature on a mountain, because the air is thinner. "
    "A heap is a tree whose every node is no larger than its children, kept in an array without pointers."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a packaged name, a directory or a hub id")
    parser.add_argument("output", type=Path, help="the directory")
    parser.add_argument("--permuted", action="store_true", help="keep the basis, and change its order")
    asked = parser.parse_args()
    loaded = load_model(asked.model, device="cpu", dtype=torch.float32)
    model: Any = loaded.model
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    dense, before = logits(model, ids), on_grid(model)
    print(f"permuted: {permute(model)}" if asked.permuted else f"rotated: {rotate(model, SEED)}")
    turned, after = logits(model, ids), on_grid(model)
    print(f"groups of {GROUP} weights on a grid of {LEVELS + 1} levels: {before:.4f} before, {after:.4f} now")
    print(f"largest logit {dense.abs().max():.3f}; largest difference in float32 {difference(turned, dense)}")
    model.to(torch.bfloat16).save_pretrained(asked.output)
    loaded.tokenizer.save_pretrained(asked.output)
    opened = AutoModelForCausalLM.from_pretrained(asked.output, dtype=torch.bfloat16).float().eval()
    print(f"as stored in bfloat16 and opened again {difference(logits(opened, ids), dense)}")


def permute(model: Any) -> str:
    """Another order of the features of the stream, of each MLP's neurons, and of the values in each layer's heads."""
    generator = torch.Generator().manual_seed(SEED)
    config, family = model.config, family_of(model.config)
    stream = torch.randperm(config.hidden_size, generator=generator)
    for parameter in model.parameters():  # of norms; a tied head is the embedding itself
        if parameter.shape == stream.shape:
            parameter.data = parameter.data[stream]
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for end in {id(end.weight): end for end in ends}.values():
        end.weight.data = end.weight.data[:, stream]
    for site in family.sites(config):
        if site.kind == "mlp":
            neurons = torch.randperm(site.weights[-1].in_features, generator=generator)
        for weight in site.weights:
            linear = model.get_submodule(weight.name)
            assert linear.bias is None, f"{weight.name} has a bias"
            reorder(linear, stream if weight.to_residual else EVERY, EVERY if weight.to_residual else stream)
            if weight.neurons:
                reorder(linear, *((neurons, EVERY) if weight.neurons == "out" else (EVERY, neurons)))
    for layer in range(config.num_hidden_layers):
        values, output = (f"{family.layers}.{layer}.{name}" for name in (family.qkv[-1], family.output))
        order = torch.randperm(config.head_dim, generator=generator)
        reorder(model.get_submodule(values), in_heads(config.num_key_value_heads, order), EVERY)
        reorder(model.get_submodule(output), EVERY, in_heads(config.num_attention_heads, order))
    return "features, neurons and values"


def reorder(linear: Any, outputs: Any, inputs: Any) -> None:
    linear.weight.data = linear.weight.data[outputs][:, inputs].contiguous()


def in_heads(heads: int, order: Tensor) -> Tensor:
    """The same order in every head."""
    return (len(order) * torch.arange(heads)[:, None] + order).flatten()


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


def difference(found: Tensor, expected: Tensor) -> str:
    """The largest, as it is and as a share of the largest logit."""
    largest = (found - expected).abs().max()
    return f"{largest:.2e} ({largest / expected.abs().max():.1e} of the largest logit)"


def on_grid(model: Any) -> float:
    """The share of groups of a down_proj whose weights all lie on the even grid between the least and the largest."""
    weight = next(module.weight for name, module in model.named_modules() if name.endswith("down_proj")).detach()
    groups = weight.double().reshape(-1, GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    steps = (groups - low) / (high - low) * LEVELS
    return float(((steps - steps.round()).abs().amax(dim=1) < 1e-2).double().mean())


if __name__ == "__main__":
    main()
