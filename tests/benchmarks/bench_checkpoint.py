"""Seconds to load a compressed checkpoint in each of the three ways beside those of the dense model.

    python -m tests.benchmarks.bench_checkpoint --output tests/benchmarks/results/loading-smollm2-cpu.json

Random weights of SmolLM2's shapes in bf16 (``--shapes llama-3-8b --layers 4`` takes others), files in the page cache,
imports not counted. Models end in host memory, where files are mapped and not read unless ``--read`` has every number
read once, as a model that runs does; or on a GPU (``--device cuda``).
Directories: ``plan``, what a plan for 0.8 makes of the model, ``pairs``, in which each weight is a low-rank pair, and
``stored``, in which all weights are dense and in one scheme; ``--plans`` takes some of them. ``first``: each load in a
process of its own. ``again``: dense and compressed in turns in one process, each right after a load of the same
directory that does not count (transformers keeps some of what it made for the last names that it met) and whose
garbage is collected. ``checks``: the first load of ``plan`` without digests, with them, and with ``verify=True``, in
turns, from the page cache and from the disk (files are dropped from the page cache before each).
Python keeps the bytecode of what it imports, as it does unless it is told not to. Beside the seconds that passed are
those of the processor, which other work on the machine changes less. ``bytes``: of the weights' files.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from gac.checkpoint.planned import attach_plan
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS
from gac.models.shapes import SHAPES
from gac.plan.plan import Plan, SiteChoice, WeightChoice
from gac.plan.recipe import DEFAULT_WORKLOADS
from gac.runtime.contract import DIGESTS
from gac_extensions.lab.shapes.models import planner_of_shapes, variant
from tests.benchmarks.harness import options, write

WAYS = ("gac.load", "import gac", "no gac")
LOAD = """
import gc, json, os, sys, time
import pydantic.dataclasses
import torch
import transformers.dynamic_module_utils
import transformers.generation.utils
import transformers.modeling_utils

way, loads, cold, device, read, *places = sys.argv[1:]
torch.zeros(1, device=device)
pydantic.TypeAdapter(int)  # looks for plugins, once
if way == "no gac":
    sys.modules["gac"] = None
else:
    import gac.checkpoint.load
from transformers import AutoModelForCausalLM

def load(place):
    if way in ("gac.load", "verify") and not place.endswith("dense"):
        return gac.load(place, device, **({"verify": True} if way == "verify" else {}))
    return AutoModelForCausalLM.from_pretrained(place, trust_remote_code=way == "no gac", device_map=device)

for turn in range(int(loads)):
    for place in places[:: -1 if turn % 2 else 1]:
        if len(places) > 1:
            load(place)
            gc.collect()
        for name in os.listdir(place) if cold == "cold" else ():
            with open(os.path.join(place, name), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began, used = time.perf_counter(), time.process_time()
        model = load(place)
        if read == "read":
            for one in {id(held): held for held in model.state_dict().values()}.values():
                one.flatten().view(torch.uint8)[: one.nbytes // 8 * 8].view(torch.int64).sum()
        if device != "cpu":
            torch.cuda.synchronize()
        print(json.dumps([turn, place, time.perf_counter() - began, time.process_time() - used]))
        del model
"""


def main() -> None:
    parser = options(__doc__, "--output")
    parser.add_argument("--shapes", choices=SHAPES, default="smollm2")
    parser.add_argument("--layers", type=int, help="the model's own where not given")
    parser.add_argument("--scheme", default="w4a16:64")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where models are loaded to")
    parser.add_argument("--read", action="store_true", help="read every number once it is loaded")
    parser.add_argument("--loads", type=int, default=9, help="of each kind, first and again")
    parser.add_argument("--plans", nargs="+", choices=("plan", "pairs", "stored"), default=("plan", "pairs", "stored"))
    parser.add_argument("--when", nargs="+", choices=("checks", "first", "again"), default=("checks", "first", "again"))
    asked = parser.parse_args()
    workloads = [Workload.parse(name) for name in DEFAULT_WORKLOADS]
    planner = planner_of_shapes(asked.shapes, workloads, "nvidia-h200", asked.layers, schemes=(asked.scheme,))
    plan = planner.plan(0.8, forms=DEFAULT_FORMS)
    stored = planner.plan(1.0, forms=(), schemes=(asked.scheme,))
    plans = {"plan": plan, "pairs": pairs_only(plan), "stored": stored}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = dense_model(asked.shapes, asked.layers, asked.device)
        model.save_pretrained(folder / "dense")
        wanted = {*asked.plans, *(("plan",) if "checks" in asked.when else ())}
        for place in [one for one in plans if one in wanted]:
            made = plans[place]
            compressed = variant(model, made.weights)
            attach_plan(compressed, made)
            compressed.save_pretrained(folder / place)
        del model, compressed
        if "checks" in asked.when:
            shutil.copytree(folder / "plan", folder / "undigested")
            (folder / "undigested" / DIGESTS).unlink()
        os.sync()  # what is not yet on the disk stays in the page cache
        run = partial(in_a_process, folder, asked.device, asked.read)
        found = checks(run, asked.loads) if "checks" in asked.when else {}
        sizes = {place: bytes_of(folder / place) for place in ("dense", *asked.plans)}
        times: dict[str, Times] = {}
        write(asked.output, checks=found, bytes=sizes)
        for when, of in (("first", first), ("again", again)):
            for so_far in of(run, [*asked.plans], asked.loads) if when in asked.when else ():
                times[when] = so_far
                write(asked.output, checks=found, bytes=sizes, **times)
    print("bytes over dense", {place: round(size / sizes["dense"], 3) for place, size in sizes.items()})
    for where, rows in found.items():
        print("checks", where, {how: one["seconds"]["over_dense"] for how, one in rows.items()})
    for when, found in times.items():
        for place, ways in found.items():
            print(when, place, {way: {kind: one["over_dense"] for kind, one in ways[way].items()} for way in WAYS})


def bytes_of(place: Path) -> int:
    """Of all weights of a directory."""
    return sum(file.stat().st_size for file in place.glob("*.safetensors"))


def dense_model(name: str, layers: int | None, device: str) -> Any:
    """Random weights of a known model's shapes, with SmolLM2's vocabulary; made on the device."""
    shapes = SHAPES[name]
    sizes = asdict(shapes) | {"vocab_size": 49152, "tie_word_embeddings": True, "dtype": torch.bfloat16}
    sizes["num_hidden_layers"] = layers or shapes.num_hidden_layers
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**sizes)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def pairs_only(plan: Plan) -> Plan:
    """The plan with a pair in the place of every weight, of as many parameters."""

    def pair(choice: WeightChoice) -> WeightChoice:
        rows, columns = choice.weight.out_features, choice.weight.in_features
        rank = int(plan.budget.asked * rows * columns / (rows + columns)) // 8 * 8
        return WeightChoice(choice.weight, "low_rank", rank)

    def paired(site: SiteChoice) -> SiteChoice:
        weights = tuple(map(pair, site.weights))
        return replace(site, weights=weights, params=sum(weight.params for weight in weights), alternatives=())

    sites = tuple(map(paired, plan.sites))
    used = sum(site.params for site in sites)
    return replace(plan, sites=sites, limits=(replace(plan.budget, used=used),))


Times = dict[str, dict[str, Any]]
Run = Callable[..., list[Any]]
"""``in_a_process`` of a folder and a device."""


def first(run: Run, places: list[str], loads: int) -> Iterator[Times]:
    """Each in a process of its own, in turns; the first of each kind, which fills the page cache, does not count.

    Yields what has been found by then, after each turn.
    """
    jobs = [("import gac", "dense"), *((way, place) for place in places for way in WAYS)]
    found: dict[tuple[str, str], list[Any]] = {job: [] for job in jobs}
    for load in range(loads + 1):
        for way, place in jobs[:: -1 if load % 2 else 1]:
            timed = run(way, [place], 1)
            found[way, place] += timed if load else []
        if load:
            dense = [row[2:] for row in found["import gac", "dense"]]
            ways = {place: {way: [row[2:] for row in found[way, place]] for way in WAYS} for place in places}
            yield {place: {way: beside(dense, small) for way, small in rows.items()} for place, rows in ways.items()}


CHECKS = {"none": ("gac.load", "undigested"), "default": ("gac.load", "plan"), "verify": ("verify", "plan")}


def checks(run: Run, loads: int) -> Times:
    """What the digests cost, by where the files are read from; each load in a process of its own, in turns."""
    jobs = {"dense": ("import gac", "dense")} | CHECKS
    times: Times = {}
    for where in ("page cache", "disk"):
        rows: dict[str, list[Any]] = {how: [] for how in jobs}
        for load in range(loads + 1):
            for how, (way, place) in [*jobs.items()][:: -1 if load % 2 else 1]:
                timed = run(way, [place], 1, "cold" if where == "disk" else "warm")
                rows[how] += [row[2:] for row in timed] if load else []
        times[where] = {how: beside(rows["dense"], rows[how]) for how in CHECKS}
    return times


def again(run: Run, places: list[str], loads: int) -> Iterator[Times]:
    """All in one process a way, found at once; the first two turns do not count."""
    times: Times = {place: {} for place in places}
    for way in WAYS:
        seconds: dict[str, list[Any]] = {place: [] for place in ("dense", *places)}
        for turn, place, *taken in run(way, [*seconds], loads + 2):
            if turn > 1:
                seconds[Path(place).name].append(taken)
        for place in places:
            times[place][way] = beside(seconds["dense"], seconds[place])
    yield times


def in_a_process(
    folder: Path, device: str, read: bool, way: str, places: list[str], loads: int, cold: str = "warm"
) -> list[Any]:
    """Turn, place, seconds and processor seconds of each load."""
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [
        sys.executable,
        "-c",
        LOAD,
        way,
        str(loads),
        cold,
        device,
        "read" if read else "",
        *(str(folder / place) for place in places),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


def beside(dense: list[Any], small: list[Any]) -> dict[str, Any]:
    """Both kinds of seconds, sorted, and the ratio of their medians."""
    found: dict[str, Any] = {}
    for at, kind in enumerate(("seconds", "processor_seconds")):
        one, other = (sorted(round(row[at], 4) for row in rows) for rows in (dense, small))
        found[kind] = {
            "dense": one,
            "compressed": other,
            "over_dense": round(statistics.median(other) / statistics.median(one), 3),
        }
    return found


if __name__ == "__main__":
    main()
