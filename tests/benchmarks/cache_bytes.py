"""Bytes of the KV cache that runs beside those that its plan counts, at a model's shapes with random weights.

    python tests/benchmarks/cache_bytes.py --output cache-bytes.json
    python tests/benchmarks/cache_bytes.py --device cpu --shapes smollm2 --layers 2 --tokens 64 --output bytes-cpu.json

For each form and share a plan is made by the shipped loss curves, so that ranks differ by layer and between keys and
values, and a model of these dims reads ``--tokens`` random tokens into transformers' dynamic cache, and fills a static
one of that length. ``planned`` is what ``plan.kv_numbers`` says, 2 bytes each; ``bytes`` are those of the cache's
tensors, ``allocated`` what the GPU has allocated more when nothing else of the run is left. Rows are written one by
one, and the same command goes on.
"""

import gc
import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from gac.core.workloads import Workload
from gac.evaluation.latency import Context, prepare
from gac.plan.plan import Plan
from gac_extensions.lab.shapes.models import model_of_shapes, planner_of_shapes, variant
from gac_extensions.lab.shapes.versions import Planner
from tests.benchmarks.harness import machine, markdown, options, write

SETTINGS = ("shapes", "layers", "tokens", "device")
DENSE = "dense"
COLUMNS = ("form", "share", "cache", "planned", "bytes", "over planned", "allocated", "over planned")


def main() -> None:
    parser = options(__doc__, "--profile", "--output", "--device")
    parser.add_argument("--shapes", default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--forms", nargs="+", default=["latent:1", "latent:1:int8"])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.35], help="of the dense cache")
    asked = parser.parse_args()
    workload = Workload("decode", 1, asked.tokens)
    planner = planner_of_shapes(asked.shapes, [workload], asked.profile, asked.layers)
    dense = model_of_shapes(asked.shapes, device=asked.device, layers=asked.layers)
    ids, record = prepare(dense, workload), resumed(asked)
    for form, share in cases(asked):
        if any((row["form"], row["share"]) == (form, share) for row in record["rows"]):
            continue
        plan = plan_of(planner, form, share)
        record["rows"] += rows_of(dense, plan, ids, {"form": form, "share": share})
        write(asked.output, **record)
    print(markdown(COLUMNS, map(cells, record["rows"])))


def resumed(asked: Namespace) -> dict[str, Any]:
    """What was measured before."""
    settings = {name: getattr(asked, name) for name in SETTINGS} | {"card": machine()["device"]}
    if not asked.output.exists():
        return {"settings": settings, "rows": []}
    found: dict[str, Any] = json.loads(asked.output.read_text())
    if found.get("settings") != settings:
        raise SystemExit(f"{asked.output} was measured with {found.get('settings')}, not {settings}")
    return found


def cases(asked: Namespace) -> Iterator[tuple[str, float]]:
    """The dense cache first."""
    yield DENSE, 1.0
    yield from ((form, share) for form in asked.forms for share in asked.shares)


def plan_of(planner: Planner, form: str, share: float) -> Plan:
    return planner.plan(1.0, forms=()) if form == DENSE else planner.plan(1.0, forms=(form,), kv_cache=share)


def rows_of(dense: PreTrainedModel, plan: Plan, ids: Tensor, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What both kinds of caches take."""
    model = variant(dense, plan.weights)
    dims = {one.name: f"{one.form} {one.dim}" for one in plan.weights if one.changed}
    planned = plan.kv_numbers[0] * ids.numel() * dense.dtype.itemsize
    for kind, fill in (("dynamic", dynamic), ("static", Context)):
        fill(model, ids)  # what libraries and kernels keep from their first run on is no cache
        before = allocated(dense)
        held: Any = fill(model, ids)
        layers = getattr(held, "cache", held).layers
        size = sum(states.nbytes for layer in layers for states in (layer.keys, layer.values))
        taken = allocated(dense) - before
        more = {"allocated": taken} if dense.device.type == "cuda" else {}
        yield case | {"cache": kind, "planned": planned, "bytes": size} | more | {"dims": dims}
        del held, layers


@torch.no_grad()
def dynamic(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    """A cache of all of these tokens, the last of them decoded."""
    cache = DynamicCache(config=model.config)
    for part in (ids[:, :-1], ids[:, -1:]):
        model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def allocated(model: PreTrainedModel) -> int:
    """Bytes on the model's GPU, of what is not garbage; 0 on a CPU."""
    gc.collect()
    return torch.cuda.memory_allocated(model.device) if model.device.type == "cuda" else 0


def cells(row: dict[str, Any]) -> list[str]:
    found = [row["form"], f"{row['share']:g}", row["cache"], f"{row['planned']:,}"]
    for name in ("bytes", "allocated"):
        found += [f"{row[name]:,}", f"{row[name] / row['planned']:.4f}"] if name in row else ["", ""]
    return found


if __name__ == "__main__":
    main()
