"""Repair checkpoints of SVD-LLM's own ranks: are the outputs the same, what is added, how much faster do they run?

    python tests/benchmarks/repair.py --output tests/benchmarks/results/repair.json

SmolLM2, compressed as SVD-LLM does (leave it out with ``--no-smollm2``), and a random model of some layers of
Llama-3-8B's shapes (``--layers 2``), in SVD-LLM's names, at its ranks ``int(out * in * ratio / (out + in))``: 1638,
655 and 2548 at 0.8. On the GPU where there is one; ``--shrink 16`` makes the second model small enough for a CPU, and
``--strategies`` has to leave out ``profile`` then.

Exits with 1 where the output of a pair, given the same inputs, differs by more than 1e-5 (float32) or 1e-2 (bfloat16),
or the logits by more than that and more than twice what running the weights in float32 changes: other kernels round
otherwise, and a model of many layers amplifies what one rounding changes.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import gac
from gac.models.loading import default_device, load_model
from gac.models.shapes import SHAPES
from gac_extensions.repairs.contract import STRATEGIES
from gac_extensions.repairs.report import RepairResult
from gac_extensions.tests.repairs import checkpoints as stored
from tests.benchmarks.harness import options, write
from tests.models.small import weights_of

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
PUBLISHED = {"minimal": 0.0372, "optimal": 0.0720}  # memory that padding head dims added on an A100
ROUNDS = 30
WORKLOADS = ("prefill:1x1024", "decode:1@1024")


def main() -> None:
    parser = options(__doc__, "--profile")
    parser.add_argument("--ratio", type=float, default=0.8)
    parser.add_argument("--calibration", default="wiki-sample:16x512", help="of SmolLM2")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--strategies", nargs="+", default=tuple(STRATEGIES), choices=tuple(STRATEGIES))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"), choices=("float32", "bfloat16"))
    parser.add_argument("--smollm2", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    rows = [row for dtype in asked.dtypes for row in measured(asked, getattr(torch, dtype))]
    write(asked.output, rows=rows)
    sys.exit(not all(map(same, rows)))


def measured(asked: argparse.Namespace, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """One row a model and strategy."""
    for name, config, tensors in checkpoints(asked, dtype):
        with tempfile.TemporaryDirectory(prefix="gac-repair-") as folder:
            theirs = Path(folder) / "theirs"
            stored.write(theirs, config, tensors)
            del tensors
            for strategy in asked.strategies if name != "smollm2" else ("minimal", "optimal"):
                ours = Path(folder) / strategy
                repaired = gac.repair(
                    theirs, ours, strategy=strategy, profile=asked.profile, workloads=WORKLOADS, measure=timed(dtype)
                )
                row = compared(name, config, dtype, theirs, ours, asked.tokens, repaired)
                print(json.dumps(row | {"same": same(row)}, indent=1), flush=True)
                yield row


def timed(dtype: torch.dtype) -> bool:
    """Whether GEMMs are timed: in bfloat16, on a GPU."""
    return dtype is torch.bfloat16 and torch.cuda.is_available()


# --- the checkpoints ------------------------------------------------------------------------------------------------


def checkpoints(asked: argparse.Namespace, dtype: torch.dtype) -> Iterator[tuple[str, LlamaConfig, dict[str, Tensor]]]:
    if asked.smollm2:
        config, weights = by_svd_llm(asked.ratio, asked.calibration)
        yield "smollm2", config, {name: values.to(dtype) for name, values in weights.items()}
    config = shaped(asked.layers, asked.shrink)
    yield "llama-3-8b shapes", config, random_weights(config, asked.ratio, dtype)


def shaped(layers: int, shrink: int) -> LlamaConfig:
    """Llama-3-8B with fewer layers and a small vocabulary; every dim over ``shrink``."""
    whole = SHAPES["llama-3-8b"]
    return LlamaConfig(
        vocab_size=1024,
        hidden_size=whole.hidden_size // shrink,
        intermediate_size=whole.intermediate_size // shrink,
        num_hidden_layers=layers,
        num_attention_heads=whole.num_attention_heads // min(shrink, 4),
        num_key_value_heads=whole.num_key_value_heads // min(shrink, 4),
        tie_word_embeddings=False,
    )


@cache
def by_svd_llm(ratio: float, calibration: str) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """SmolLM2 with SVD-LLM's whitened factors at its own ranks, under its names."""
    loaded = load_model("smollm2")
    config = copy.deepcopy(loaded.model.config)
    plan = gac.allocate(
        loaded.model,
        ratio,
        method="svd-llm",
        forms=["low_rank"],
        rule="uniform",
        align=False,
        refit="none",
        calibration=calibration,
        tokenizer=loaded.tokenizer,
    )
    model = gac.compress(loaded.model, plan, tokenizer=loaded.tokenizer, heal=0)
    weights = {name: values.cpu() for name, values in model.state_dict().items()}
    for name in stored.weight_names(config):
        second, first = (weights.pop(f"{name}.{factor}.weight") for factor in ("second", "first"))
        weights |= stored.svd_llm(name, second, first)
    return config, weights


def random_weights(config: LlamaConfig, ratio: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """At SVD-LLM's ranks, under its names."""
    torch.manual_seed(0)
    hidden = config.hidden_size
    with torch.device("meta"):
        names = [name for name, _ in LlamaForCausalLM(config).named_parameters()]
    with torch.device(default_device()):
        tensors = {name: torch.randn(config.vocab_size, hidden) / hidden**0.5 for name in EMBEDDINGS}
        tensors |= {name: torch.ones(hidden) for name in names if "norm" in name}
        for weight in weights_of(config):
            out, into = weight.out_features, weight.in_features
            rank = int(weight.params * ratio / (out + into))
            second, first = torch.randn(out, rank) / rank**0.5, torch.randn(rank, into) / into**0.5
            tensors |= stored.svd_llm(weight.name, second, first)
    return {name: values.to(dtype).cpu() for name, values in tensors.items()}


EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


# --- what they compute, and how fast --------------------------------------------------------------------------------


def compared(
    name: str, config: Any, dtype: torch.dtype, theirs: Path, ours: Path, tokens: int, repaired: RepairResult
) -> dict[str, Any]:
    before, after = (opened(config, stored.read(place), dtype) for place in (theirs, ours))
    ids = torch.arange(tokens, device=default_device())[None] % config.vocab_size
    with torch.inference_mode():
        expected, found = before(ids).logits.float(), after(ids).logits.float()
        pairs = of_pairs(before, after, ids)
        prefill = interleaved([before, after], ids) if timed(dtype) else (None, None)
        del before, after
        whole = {key: values.float() for key, values in stored.read(theirs).items()}
        exact = opened(config, whole, torch.float32)(ids).logits
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "strategy": repaired.contract.strategy,
        "dims": sorted({(one.dim, one.becomes) for one in repaired.moved}),
        "pairs": pairs,
        "difference": stored.relative(found, expected),
        "own_error": stored.relative(expected, exact),
        "error": stored.relative(found, exact),
        "limit": LIMITS[dtype],
        "overhead": repaired.overhead,
        "published_overhead": PUBLISHED.get(repaired.contract.strategy),
        "model_prefill_ms": prefill,
        "gemms": [
            (one.how, one.workload, one.before_ns, one.after_ns, one.before_unknown, one.after_unknown)
            for one in repaired.times
        ],
    }


def of_pairs(before: LlamaForCausalLM, after: LlamaForCausalLM, ids: Tensor) -> float:
    """The largest relative difference between the outputs of a pair and of the repaired one, given the same inputs."""
    differences = []

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def compare(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            differences.append(stored.relative(after.get_submodule(name)(*inputs).float(), output.float()))

        return compare

    pairs = [name for name, module in before.named_modules() if isinstance(module, nn.Sequential)]
    handles = [before.get_submodule(name).register_forward_hook(hook(name)) for name in pairs]
    before(ids)
    for handle in handles:
        handle.remove()
    return max(differences)


def same(row: dict[str, Any]) -> bool:
    """Whether every pair writes the same, and the model within its limit or what rounding to the dtype costs it."""
    return bool(row["pairs"] <= row["limit"] and row["difference"] <= max(row["limit"], 2 * row["own_error"]))


def opened(config: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> LlamaForCausalLM:
    """The model with every factored weight as two linear layers."""
    with torch.device(default_device()):
        model: Any = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
    for name in stored.weight_names(config):
        stem = name.removesuffix("_proj")
        factors = [tensors.pop(f"{stem}_{side}_proj.weight").to(model.device) for side in ("v", "u")]
        model.set_submodule(name, nn.Sequential(*map(linear, factors)))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all("_proj." in name or name == "lm_head.weight" for name in missing), missing
    loaded: LlamaForCausalLM = model
    return loaded


def linear(weight: Tensor) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def interleaved(models: list[LlamaForCausalLM], ids: Tensor) -> tuple[float, ...]:
    """Median ms of each model's forward pass, turn by turn, by CUDA events."""
    samples: list[list[float]] = [[] for _ in models]
    for turn in range(ROUNDS + 5):
        for model, found in zip(models, samples, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            model(ids, use_cache=False)
            end.record()
            end.synchronize()
            if turn >= 5:
                found.append(begin.elapsed_time(end))
    return tuple(map(statistics.median, samples))


if __name__ == "__main__":
    main()
