"""A model that is rotated: the same function, by weights that lie on no grid. Written as an ordinary directory.

    python tests/benchmarks/rotated.py smollm2 rotated-smollm2

The weights of the packaged SmolLM2 lie on a 4-bit grid in groups of 32, so that rounding them to 4 bits proves nothing.
Here gains are folded, and the residual stream and the values of heads rotated, in float32 (computed in float64). The
largest difference of logits is printed, in float32 and as stored in bfloat16. The head stops being tied.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gac.models.loading import load_model
from gac.models.rotation import rotate

SEED = 1
"""Not that of ``rotate=True``, which rotates another way."""
GROUP = 32
LEVELS = 15
TEXT = (
    "The capital of France is Paris. Water boils at a lower temperature on a mountain, because the air is thinner. "
    "A heap is a tree whose every node is no larger than its children, kept in an array without pointers."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a packaged name, a directory or a hub id")
    parser.add_argument("output", type=Path, help="the directory")
    asked = parser.parse_args()
    loaded = load_model(asked.model, device="cpu", dtype=torch.float32)
    model: Any = loaded.model
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    dense, before = logits(model, ids), on_grid(model)
    rotation = rotate(model, SEED)
    turned, after = logits(model, ids), on_grid(model)
    print(f"{rotation}")
    print(f"groups of {GROUP} weights on a grid of {LEVELS + 1} levels: {before:.4f} before, {after:.4f} rotated")
    print(f"largest logit {dense.abs().max():.3f}; largest difference in float32 {difference(turned, dense)}")
    model.to(torch.bfloat16).save_pretrained(asked.output)
    loaded.tokenizer.save_pretrained(asked.output)
    opened = AutoModelForCausalLM.from_pretrained(asked.output, dtype=torch.bfloat16).float().eval()
    print(f"as stored in bfloat16 and opened again {difference(logits(opened, ids), dense)}")


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
