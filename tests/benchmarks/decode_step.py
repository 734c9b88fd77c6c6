"""Decoding one sequence with the Triton decode kernel and without: launched one by one, compiled, in CUDA graphs.

    python tests/benchmarks/decode_step.py --output decode-step.json

A dense model of Llama-3-8B's shapes, eight layers, random weights in bfloat16, a static cache after 1,024 tokens. Both
take turns, 15 each of ten tokens; medians in ms a token.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from reading import machine
from torch import Tensor
from transformers import StaticCache

from gac.evaluation.shapes import model_of_shapes
from gac.runtime.decode import use_decode_kernel

MODES = (None, "default", "reduce-overhead")
CONTEXT, TURNS, TOKENS, FIRST = 1024, 15, 10, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    plain = model_of_shapes("llama-3-8b", layers=asked.layers)
    shared: dict[int, Any] = {id(one): one for one in (*plain.parameters(), *plain.buffers())}
    ours = copy.deepcopy(plain, shared)
    use_decode_kernel(ours)
    found = {}
    for mode in MODES:
        steps = {"torch": step_of(plain, mode), "triton": step_of(ours, mode)}
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(TURNS):
            for name, step in steps.items():
                samples[name].append(ms_of(step))
        found[str(mode)] = {name: median(of) for name, of in samples.items()}
        print(mode or "launched one by one", found[str(mode)], flush=True)
        torch._dynamo.reset()
    if asked.output:
        asked.output.write_text(json.dumps({"command": sys.argv, **machine(), "ms": found}, indent=1) + "\n")


@torch.no_grad()
def step_of(model: Any, mode: str | None) -> Callable[[], Tensor]:
    """One more token, behind the context and those of all steps before; compiled and warm."""
    steps = FIRST + TURNS * TOKENS
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + steps)
    ids = torch.ones((1, CONTEXT), dtype=torch.long, device=model.device)
    model(ids, past_key_values=cache, use_cache=True)
    position = torch.tensor([[CONTEXT]], device=model.device)
    run = model if mode is None else torch.compile(model, mode=mode, fullgraph=True)

    def step() -> Tensor:
        with torch.no_grad():
            logits: Tensor = run(ids[:, :1], past_key_values=cache, use_cache=True, position_ids=position).logits
        return logits

    for _ in range(FIRST):
        step()
    return step


def ms_of(step: Callable[[], Tensor]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(TOKENS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / TOKENS * 1e3


if __name__ == "__main__":
    main()
