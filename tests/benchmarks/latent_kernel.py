"""One new token's attention over a cache of latents, beside the fastest of PyTorch's attentions over the dense cache.

    python tests/benchmarks/latent_kernel.py --output latent-kernel.json
    python tests/benchmarks/latent_kernel.py --device cpu --workloads 1@96 --heads 4 --kv-heads 2 --size 64 \
        --output latent-kernel-cpu.json

A workload is ``batch@context``. Sizes are those of Llama-3-8B's attention; a share of its cache is that of the ranks of
keys and values, multiples of 16, in groups of so many heads. ``--keys`` says what part of both is of keys.
Medians as ``gac profile`` takes them: CUDA graphs, every launch on another cache, L2 flushed. The dense cache is
attended to by each backend of PyTorch, with the queries of a head as heads of their own and as tokens; ``ratio`` is the
fastest of them over the kernel. ``bytes`` are of the latents and of the factors, ``share`` is what they would take at
the bandwidth of a copy, over what the kernel takes. Error is against float32. Rows are written one by one,
and the same command goes on.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gac.runtime.kernels import gpu
from gac.runtime.kernels.elementwise.rows import plainly_rotated
from gac.runtime.kernels.latent_attention.launch import Attention
from gac.runtime.kernels.latent_attention.layout import turns_of, with_runs
from tests.benchmarks.harness import machine, options, write
from tests.benchmarks.kernels.bench import clock_of, copied_bytes

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
SETTINGS = ("heads", "kv_heads", "size")
ALIGNED = 16
Calls = Callable[[int], Sequence[Callable[[], object]]]


@dataclass(frozen=True)
class Sizes:
    """Of an attention."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    size: int
    device: str

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).bfloat16()

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """The query and the cache."""
        cache = self.batch, self.kv_heads, self.context, self.size
        return self.normal(self.batch, self.heads, 1, self.size), self.normal(*cache), self.normal(*cache)

    def latent(self, group: int, ranks: Sequence[int]) -> Attention:
        """The same attention over latents of each group of heads: keys of the first rank, values of the second."""
        groups = self.kv_heads // group
        keys, values = (self.normal(self.batch, self.context, groups * rank) for rank in ranks)
        factors = [self.normal(groups, group * self.size, rank) / rank**0.5 for rank in ranks]
        frequencies = 5e5 ** -(torch.arange(self.size // 2, device=self.device) / (self.size // 2))
        query = self.normal(self.batch, self.heads, 1, self.size)
        positions = with_runs(torch.arange(self.context, device=self.device)[None])
        turns = turns_of(frequencies, self.size)
        key, value = ((one, None) for one in factors)
        given = keys, values, None, None, *key, *value
        return Attention(query, *given, None, frequencies, turns, positions, None, self.size**-0.5)


def latent_calls(given: Attention, count: int) -> list[Callable[[], object]]:
    """Each on a cache of its own."""
    sets = [given, *(replace(given, keys=given.keys.clone(), values=given.values.clone()) for _ in range(count - 1))]
    return [one.run for one in sets]


def dense_calls(given: tuple[Tensor, Tensor, Tensor], backend: str, count: int) -> list[Callable[[], object]]:
    sets = [given, *((given[0], given[1].clone(), given[2].clone()) for _ in range(count - 1))]
    return [partial(attended, *one, backend) for one in sets]


def attended(query: Tensor, keys: Tensor, values: Tensor, backend: str) -> Tensor:
    """PyTorch's attention; ``packed``: the queries of a head are tokens."""
    name, _, packed = backend.partition(":")
    given = query.view(len(query), keys.shape[1], -1, query.shape[-1]) if packed else query
    with sdpa_kernel(BACKENDS[name]):
        return scaled_dot_product_attention(given, keys, values, enable_gqa=not packed).view_as(query)


def expected(given: Attention, text: int) -> Tensor:
    """In float32, of one text: ``(heads, size)``."""

    def made(latents: Tensor, factor: Tensor | None) -> Tensor:
        assert factor is not None
        parts = latents[text].float().unflatten(-1, (len(factor), -1))
        return torch.einsum("tgr,gfr->gft", parts, factor.float()).reshape(given.heads, given.size, -1).transpose(1, 2)

    assert given.frequencies is not None
    at = torch.arange(given.keys.shape[1], device=given.keys.device)[:, None].float()
    angles = (at * given.frequencies).repeat(1, 2)
    keys = made(given.keys, given.k_factor)[None]
    keys = plainly_rotated(keys, keys, angles.cos()[None], angles.sin()[None])[1][0]
    queries = given.query[text, :, 0].float().view(given.heads, -1, given.size)
    scores = queries @ keys.transpose(1, 2) * given.scale
    return (scores.softmax(-1) @ made(given.values, given.v_factor)).flatten(0, 1)


def row_of(clock: Any, bandwidth: float, given: Attention) -> dict[str, Any]:
    """What the kernel takes."""
    wanted, found = expected(given, len(given.query) - 1), given.run()[-1, 0].float()
    error = float((found - wanted).norm() / wanted.norm())
    tensors = (given.keys, given.values, given.k_factor, given.v_factor)
    size = sum(one.numel() * one.element_size() for one in tensors if one is not None)
    row = clock.time(partial(latent_calls, given), size)
    return row | {"error": error, "bytes": size, "share": size / bandwidth / (1000 * row["us"])}


def dense_row(clock: Any, bandwidth: float, sizes: Sizes) -> dict[str, Any]:
    """What each of PyTorch's attentions takes, and the fastest of them."""
    given, found = sizes.dense(), {}
    size = sum(one.numel() * one.element_size() for one in given)
    for backend in [name + form for name in BACKENDS for form in ("", ":packed")]:
        with suppress(RuntimeError):  # not every backend takes every form
            found[backend] = clock.time(partial(dense_calls, given, backend), size)["us"]
    fastest = min(found, key=lambda name: float(found[name]))
    us = found[fastest]
    return {"us": us, "fastest": fastest, "all_us": found, "bytes": size, "share": size / bandwidth / (1000 * us)}


def cases(asked: Namespace) -> Iterator[dict[str, Any]]:
    """The dense cache of each workload first."""
    for workload in asked.workloads:
        yield {"workload": workload, "kind": "dense"}
        for share in asked.shares:
            for group in asked.groups:
                full = group * asked.size
                both = 2 * max(ALIGNED, _aligned(share * full))
                for part in asked.keys:  # no rank is 0, and none above the full one
                    keys = min(max(_aligned(part * both), ALIGNED, both - full), both - ALIGNED, full)
                    named = {"kind": "latent", "group": group, "ranks": [keys, both - keys]}
                    yield {"workload": workload} | named | {"cache": both / (2 * full)}


def _aligned(rank: float) -> int:
    return round(rank / ALIGNED) * ALIGNED


def measured(asked: Namespace, clock: Any, bandwidth: float, case: dict[str, Any], dense: dict[str, float]) -> Any:
    """The case with its figures, or with why there are none."""
    batch, context = map(int, case["workload"].split("@"))
    sizes = Sizes(batch, context, asked.heads, asked.kv_heads, asked.size, asked.device)
    try:
        if case["kind"] == "dense":
            return case | dense_row(clock, bandwidth, sizes)
        given = sizes.latent(case["group"], case["ranks"])
        row = row_of(clock, bandwidth, given)
        return case | row | {"ratio": dense[case["workload"]] / row["us"]}
    except Exception as failure:  # noqa: BLE001 - one that does not fit is a row too
        return case | {"failed": f"{type(failure).__name__}: {failure}".splitlines()[0][:200]}


def told(row: dict[str, Any]) -> str:
    head = f"{row['workload']:10} {row['kind']:6}"
    if row["kind"] == "latent":
        head += f" {row['cache']:.3f} of the cache, groups of {row['group']}, ranks {row['ranks']}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    figures = f"{head} {row['us']:8.1f} us, {100 * row['share']:3.0f} % of what its bytes allow"
    return figures + (
        f", {row['ratio']:.2f}x dense, error {row['error']:.1e}" if "ratio" in row else f", {row['fastest']}"
    )


def main() -> None:
    parser = options(__doc__, "--output", "--device")
    parser.add_argument("--workloads", nargs="+", default=("1@32768", "16@8192", "1@131072"))
    parser.add_argument("--shares", nargs="+", type=float, default=(0.5, 0.35))
    parser.add_argument("--groups", nargs="+", type=int, default=(1, 2, 4), help="heads of a group")
    parser.add_argument("--keys", nargs="+", type=float, default=(0.5,), help="their part of both ranks")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="of a head")
    asked = parser.parse_args()
    asked.groups = [group for group in asked.groups if asked.kv_heads % group == 0]
    settings = {name: getattr(asked, name) for name in SETTINGS} | {
        name: machine()[name] for name in ("device", "versions")
    }
    record: dict[str, Any] = {"settings": settings, "rows": []}
    if asked.output.exists():
        record = json.loads(asked.output.read_text())
        if record["settings"] != settings:
            raise SystemExit(f"{asked.output} was measured with {record['settings']}, not {settings}")
    with _few_sms() if asked.device == "cpu" else nullcontext():
        _measure(asked, record)


def _few_sms() -> Any:
    """Programs as for some SMs of an H100."""
    return patch.object(gpu, "processors", lambda device: 4)


def _measure(asked: Namespace, record: dict[str, Any]) -> None:
    """What is left; rows are written one by one."""
    clock = clock_of(asked.device)
    record["copy_bytes_per_ns"] = bandwidth = copied_bytes(clock, asked.device)
    print(f"a copy reads and writes {bandwidth / 1000:.2f} TB/s", flush=True)
    rows = record["rows"]
    for case in cases(asked):
        if any(case.items() <= row.items() for row in rows):
            continue
        dense = {row["workload"]: row["us"] for row in rows if row["kind"] == "dense" and "us" in row}
        rows.append(measured(asked, clock, bandwidth, case, dense))
        write(asked.output, **record)
        print(told(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
