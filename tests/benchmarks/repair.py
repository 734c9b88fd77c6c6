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
from reading import machine
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import gac
from gac.lab.studies import published
from gac.models.families import family_of
from gac.models.loading import load_model
from gac.models.shapes import SHAPES
from gac.repairs.contract import STRATEGIES
from gac.repairs.report import Repaired

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
PUBLISHED = {"minimal": 0.0372, "optimal": 0.0720}  # memory that padding head dims added on an A100
ROUNDS = 30
WORKLOADS = ("prefill:1x1024", "decode:1@1024")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.8)
    parser.add_argument("--calibration", default="wiki-sample:16x512", help="of SmolLM2")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--strategies", nargs="+", default=tuple(STRATEGIES), choices=tuple(STRATEGIES))
    parser.add_argument("--profile", default="nvidia-h100-80gb-hbm3")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"), choices=("float32", "bfloat16"))
    parser.add_argument("--smollm2", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    rows = [row for dtype in asked.dtypes for row in measured(asked, getattr(torch, dtype))]
    print_published()
    if asked.output:
        asked.output.write_text(json.dumps(machine() | {"rows": rows}, indent=1) + "\n")
    sys.exit(not all(map(same, rows)))


def measured(asked: argparse.Namespace, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """One row a model and strategy."""
    for name, config, tensors in checkpoints(asked, dtype):
        with tempfile.TemporaryDirectory(prefix="gac-repair-") as folder:
            theirs = Path(folder) / "theirs"
            write(theirs, config, tensors)
            del tensors
            for strategy in asked.strategies if name != "smollm2" else ("minimal", "optimal"):
                ours = Path(folder) / strategy
                repaired = gac.repair(
                    theirs, ours, strategy=strategy, profile=asked.profile, workloads=WORKLOADS, measure=timed(dtype)
                )
                row = compared(name, config, dtype, theirs, ours, asked.tokens, repaired)
                print_row(row)
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


def rank(out: int, into: int, ratio: float) -> int:
    """SVD-LLM's rank of a weight."""
    return int(out * into * ratio / (out + into))


def linear_weights(config: Any) -> list[tuple[str, int, int]]:
    sites = family_of(config).sites(config)
    return [(weight.name, weight.out_features, weight.in_features) for site in sites for weight in site.weights]


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
    model = gac.compress(loaded.model, plan, tokenizer=loaded.tokenizer)
    weights = {name: values.cpu() for name, values in model.state_dict().items()}
    for name, _, _ in linear_weights(config):
        weights |= pair(name, weights.pop(f"{name}.second.weight"), weights.pop(f"{name}.first.weight"))
    return config, weights


def pair(name: str, second: Tensor, first: Tensor) -> dict[str, Tensor]:
    stem = name.removesuffix("_proj")
    return {f"{stem}_u_proj.weight": second.contiguous(), f"{stem}_v_proj.weight": first.contiguous()}


def random_weights(config: LlamaConfig, ratio: float, dtype: torch.dtype) -> dict[str, Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = config.hidden_size
    tensors = {name: torch.randn(config.vocab_size, hidden, device=device) / hidden**0.5 for name in EMBEDDINGS}
    tensors |= {name: torch.ones(hidden, device=device) for name in norms(config)}
    for name, out, into in linear_weights(config):
        r = rank(out, into, ratio)
        second, first = torch.randn(out, r, device=device) / r**0.5, torch.randn(r, into, device=device) / into**0.5
        tensors |= pair(name, second, first)
    return {name: values.to(dtype).cpu() for name, values in tensors.items()}


EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


def norms(config: LlamaConfig) -> list[str]:
    of_layer = ("input_layernorm", "post_attention_layernorm")
    layers = range(config.num_hidden_layers)
    return [*(f"model.layers.{layer}.{name}.weight" for layer in layers for name in of_layer), "model.norm.weight"]


def write(directory: Path, config: Any, tensors: dict[str, Tensor]) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    kept = {name: values.contiguous().clone() for name, values in tensors.items()}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


# --- what they compute, and how fast --------------------------------------------------------------------------------


def compared(
    name: str, config: Any, dtype: torch.dtype, theirs: Path, ours: Path, tokens: int, repaired: Repaired
) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before, after = (opened(config, load_file(place / "model.safetensors"), dtype, device) for place in (theirs, ours))
    ids = torch.arange(tokens, device=device)[None] % config.vocab_size
    with torch.inference_mode():
        expected, found = before(ids).logits.float(), after(ids).logits.float()
        pairs = of_pairs(before, after, ids)
        prefill = interleaved([before, after], ids) if timed(dtype) else (None, None)
        del before, after
        whole = {key: values.float() for key, values in load_file(theirs / "model.safetensors").items()}
        exact = opened(config, whole, torch.float32, device)(ids).logits
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "strategy": repaired.contract.strategy,
        "dims": sorted({(one.dim, one.becomes) for one in repaired.moved}),
        "pairs": pairs,
        "difference": relative(found, expected),
        "own_error": relative(expected, exact),
        "error": relative(found, exact),
        "limit": LIMITS[dtype],
        "overhead": repaired.overhead,
        "published_overhead": PUBLISHED.get(repaired.contract.strategy),
        "model_prefill_ms": prefill,
        "gemms": [
            (one.how, one.workload, one.before_ns, one.after_ns, one.before_unknown, one.after_unknown)
            for one in repaired.times
        ],
    }


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def of_pairs(before: LlamaForCausalLM, after: LlamaForCausalLM, ids: Tensor) -> float:
    """The largest relative difference between the outputs of a pair and of the repaired one, given the same inputs."""
    differences = []

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def compare(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            differences.append(relative(after.get_submodule(name)(*inputs).float(), output.float()))

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


def opened(config: Any, tensors: dict[str, Tensor], dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """The model with every factored weight as two linear layers."""
    with torch.device(device):
        model: Any = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
    for name, _, _ in linear_weights(config):
        stem = name.removesuffix("_proj")
        factors = (tensors.pop(f"{stem}_{side}_proj.weight").to(device) for side in ("v", "u"))
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


# --- what is printed ------------------------------------------------------------------------------------------------


def print_row(row: dict[str, Any]) -> None:
    dims = ", ".join(f"{dim} to {becomes}" for dim, becomes in row["dims"]) or "none"
    print(f"\n{row['model']}, {row['dtype']}, {row['strategy']}: {dims}")
    print(f"  outputs   {'same' if same(row) else 'DIFFERENT'} (limit {row['limit']:.0e})")
    print(f"            of a pair, given the same inputs: relative difference at most {row['pairs']:.2e}")
    print(f"            of the model's logits: {row['difference']:.2e}; from those of the weights run in float32")
    print(f"            {row['error']:.2e}, and those before repair {row['own_error']:.2e}")
    theirs = row["published_overhead"]
    beside = "" if theirs is None else f"; A100, padded head dims, published: {theirs:.2%}"
    print(f"  memory    +{row['overhead']:.2%}{beside}")
    if row["model_prefill_ms"][0] is not None:
        before, after = row["model_prefill_ms"]
        print(f"  model     prefill {before:.3f} -> {after:.3f} ms, {before / after:.2f}x as fast")
    for how, workload, before, after, *unknown in row["gemms"]:
        if before is None or after is None:
            print(f"  GEMMs     {workload} {how}: unknown for {unknown[0]} before, {unknown[1]} after")
        else:
            print(f"  GEMMs     {workload} {how}: {before / 1e6:.3f} -> {after / 1e6:.3f} ms, {before / after:.2f}x")


def print_published() -> None:
    print("\npublished, A100, SDPA at B=4 S=2048 H=32 fp16, head_dim zero-padded to a multiple of 8 and of 16:")
    for row in published.rows("a100_repair"):
        to_8, to_16 = (row.original_ms / ms for ms in (row.pad_to_8_ms, row.pad_to_16_ms))
        print(f"  head_dim {row.head_dim}: {row.original_ms:.3f} ms, {to_8:.2f}x and {to_16:.2f}x as fast")


if __name__ == "__main__":
    main()
