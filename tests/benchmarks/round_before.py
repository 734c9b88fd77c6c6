"""Norm, rounding and GEMMs of 8 bits: rounded where inputs are made, beside rounded by each GEMM.

    python tests/benchmarks/round_before.py --output round-before.json

A norm with q/k/v behind it, and a norm with a gated MLP, at Llama-3-8B's shapes, as compressed models run them: with
shared first GEMMs, in CUDA graphs, weights and inputs from memory. Medians as ``gac profile`` takes them, of three
turns; the fastest and the slowest turn are written down. ``bf16`` is the same block in 16 bits. ``--part 64`` divides
the sizes, to try the script with ``--device cpu``, where nothing is rounded before.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from gac.runtime.fusion.quantised_inputs import quantise_in_norms
from gac.runtime.fusion.shared_gemm import share_gemm
from gac.runtime.storage.modules import StoredLinear
from gac.schemes import scheme_named
from gac.schemes.base import storage_of
from tests.benchmarks.harness import markdown, options, write
from tests.benchmarks.kernels.bench import CpuClock, GpuClock

HIDDEN, KEYS, NEURONS = 4096, 1024, 14336
ROWS = (1, 16, 64, 1024, 4096)
SCHEMES = ("fp8", "w8a8")
TURNS = 3


class Attention(nn.Module):
    """A norm, and the weights that read it."""

    shared = ("q_proj", "k_proj", "v_proj")
    made = ({"by": "norm", "readers": shared},)

    def __init__(self, part: int) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(HIDDEN // part)
        for name, rows in zip(self.shared, (HIDDEN, KEYS, KEYS), strict=True):
            setattr(self, name, nn.Linear(HIDDEN // part, rows // part, bias=False))

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        read = self.norm(x)
        return [getattr(self, name)(read) for name in self.shared]


class MLP(nn.Module):
    """A norm and an MLP."""

    shared = ("mlp.gate_proj", "mlp.up_proj")
    made = ({"by": "norm", "readers": shared},)

    def __init__(self, part: int) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(HIDDEN // part)
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=HIDDEN // part, intermediate_size=NEURONS // part))

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        return [self.mlp(self.norm(x))]


BLOCKS: dict[str, Callable[[int], Any]] = {"norm, q/k/v": Attention, "norm, MLP": MLP}


def main() -> None:
    parser = options(__doc__, "--output", "--device")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--part", type=int, default=1)
    asked = parser.parse_args()
    clock: GpuClock | CpuClock = GpuClock() if asked.device == "cuda" else CpuClock()
    rows: list[dict[str, Any]] = []
    for name, make in BLOCKS.items():
        torch.manual_seed(0)
        with torch.device(asked.device), torch.no_grad():
            plain = make(asked.part).bfloat16().eval().requires_grad_(False)
            for scheme in asked.schemes:
                blocks = versions(plain, scheme)
                rows += [{"block": name, "scheme": scheme} | measured(clock, blocks, m) for m in asked.rows]
    write(asked.output, rows=rows)
    columns = ("block", "scheme", "m", "bf16_us", "apart_us", "before_us", "apart / before", "bf16 / before")
    print(markdown(columns, [[_told(row[column]) for column in columns] for row in rows]))


def versions(plain: Any, scheme: str) -> dict[str, nn.Module]:
    """The block in 16 bits, in a scheme, and in it with inputs rounded before."""
    found = {"bf16": copy.deepcopy(plain), "apart": _stored(plain, scheme), "before": _stored(plain, scheme)}
    for block in found.values():
        share_gemm(block, plain.shared)
    quantise_in_norms(found["before"], plain.made)
    return found


def _stored(plain: nn.Module, scheme: str) -> nn.Module:
    found, spec = copy.deepcopy(plain), scheme_named(scheme)
    storage = storage_of(spec)
    assert storage is not None, scheme
    for name, one in plain.named_modules():
        if isinstance(one, nn.Linear):
            held = StoredLinear.of(storage, one)
            held.fill(spec.stored(one.weight))
            found.set_submodule(name, held)
    return found


def measured(clock: GpuClock | CpuClock, blocks: dict[str, nn.Module], rows: int) -> dict[str, Any]:
    """Microseconds of each version, and how far the two in 8 bits are apart."""
    gain = blocks["bf16"].get_parameter("norm.weight")
    x = torch.randn(rows, len(gain), device=gain.device).bfloat16()
    apart, before = (torch.cat([one.flatten() for one in blocks[name](x)]).float() for name in ("apart", "before"))
    found: dict[str, Any] = {"m": rows, "error": float((before - apart).norm() / apart.norm())}
    turns: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(TURNS):
        for name, block in blocks.items():
            turns[name].append(clock.time(partial(_calls, block, x), _bytes(block))["us"])
    for name, us in turns.items():
        found |= {f"{name}_us": median(us), f"{name}_turns_us": [min(us), max(us)]}
    for name in ("apart", "bf16"):
        found[f"{name} / before"] = found[f"{name}_us"] / found["before_us"]
    return found


def _calls(block: nn.Module, x: Tensor, count: int) -> list[Callable[[], object]]:
    """Calls on buffers of their own."""
    return [partial(copy.deepcopy(block) if at else block, x.clone()) for at in range(count)]


def _bytes(block: nn.Module) -> int:
    """Of what each call reads, inputs apart."""
    return sum(one.nbytes for one in (*block.parameters(), *block.buffers()))


def _told(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
