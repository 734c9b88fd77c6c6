"""Decoding one sequence with the Triton decode kernel and without: launched one by one, compiled, in CUDA graphs.

    python tests/benchmarks/decode_step.py --output decode-step.json

A dense model of Llama-3-8B's shapes, eight layers, random weights in bfloat16, a static cache after 1,024 tokens. Both
take turns, 15 each of ten tokens; medians in ms a token.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from gac.evaluation.shapes import model_of_shapes, variant
from tests.benchmarks.harness import options, write

MODES = (None, "default", "reduce-overhead")
CONTEXT, TURNS, TOKENS, FIRST = 1024, 15, 10, 4


def main() -> None:
    parser = options(__doc__, "--output")
    parser.add_argument("--layers", type=int, default=8)
    asked = parser.parse_args()
    plain = model_of_shapes("llama-3-8b", layers=asked.layers)
    models = {"torch": plain, "triton": variant(plain, (), triton=True)}
    found = {}
    for mode in MODES:
        steps = {name: step_of(model, mode) for name, model in models.items()}
        turns = [{name: ms_of(step) for name, step in steps.items()} for _ in range(TURNS)]
        found[str(mode)] = {name: median(turn[name] for turn in turns) for name in steps}
        print(mode or "launched one by one", found[str(mode)], flush=True)
        torch._dynamo.reset()
    write(asked.output, ms=found)


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
