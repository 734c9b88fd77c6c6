"""Seconds and memory of measuring a random model of Llama-3-8B's shapes in several processes, beside one.

    python -m tests.benchmarks.distributed_calibration --ranks 1 2 4 --output distributed.json

Each number of processes is started by torchrun, with a GPU for each process and a home of its own; it runs
``gac.allocate``, and its parts are timed as ``scale.py`` times them, on rank 0. ``--layers 8 --model llama-3-70b`` is
the share of a larger model, and ``--whole`` extrapolates to all of its layers. ``--streamed`` keeps the weights in a
mapped file, and brings each module's to the GPU as it runs. ``--shrink 64`` is for a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from gac.core.distributed.run import this_run
from gac.models.loading import default_device
from gac.models.shapes import SHAPES
from gac.models.streaming import streamed
from tests.benchmarks.harness import markdown, write
from tests.benchmarks.scale import Report, allocated, gpu_memory, model_of, parser_of, prepare

STATISTICS = ("forward, loss", "layers backward, moments")
CURVES = ("fit of the layers", "prices of rounding", "storing (to the host; waiting for the disk)")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="how many processes; 1 first")
    parser.add_argument("--streamed", action="store_true")
    parser.add_argument("--whole", action="store_true", help="extrapolate to all layers of the model")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked)
        return
    with tempfile.TemporaryDirectory(prefix="gac-ranks-", dir=asked.home) as folder:
        found = {count: started(count, Path(folder)) for count in asked.ranks}
    rows = {count: summary(asked, one, found[asked.ranks[0]]) for count, one in found.items()}
    write(asked.output, summary=rows, runs=found)
    columns = ("processes", *next(iter(rows.values())))
    print(markdown(columns, [(str(count), *(f"{one:.2f}" for one in row.values())) for count, row in rows.items()]))


def started(count: int, folder: Path) -> dict[str, Any]:
    """What rank 0 of so many processes reports."""
    report, home = folder / f"{count}.json", folder / f"home-{count}"
    home.mkdir()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    own = ("--worker", "--home", str(home), "--output", str(report))  # the last of an option counts
    command = (*torchrun, "-m", "tests.benchmarks.distributed_calibration", *sys.argv[1:], *own)
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(report.read_bytes())
    return found


def work(asked: argparse.Namespace) -> None:
    """What each process does."""
    os.environ["GAC_HOME"] = str(asked.home)
    ranks = this_run()
    report = Report(asked, silent=not ranks.leads)
    model = on_disk(asked, ranks.leads) if asked.streamed else model_of(asked)
    report.say(f"model of {sum(values.numel() for values in model.parameters()) / 1e9:.2f} billion parameters")
    prepare(asked, report, model.config.vocab_size)
    ranks.wait()
    allocated(asked, report, model)
    memory = ranks.gathered(gpu_memory() | {"host_gb": host_gb()})
    report.parts()
    report.say("measured", ranks=memory)


def on_disk(asked: argparse.Namespace, leads: bool) -> PreTrainedModel:
    """The model in a file that all processes of the host map, streamed to the GPU of each."""
    folder = asked.home / "model"
    if leads:
        model_of(asked).to("cpu").save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return streamed(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval(), default_device())


def host_gb() -> float:
    """Of this process's pages in memory, those it shares counted in part."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e9


def summary(asked: argparse.Namespace, run: dict[str, Any], first: dict[str, Any]) -> dict[str, float]:
    """Seconds of the parts and of all, the ratio to the first run, and the memory that the fullest process takes."""
    seconds, held = run["seconds"], run["ranks"]
    found = {
        "statistics (s)": sum(seconds[part] for part in STATISTICS),
        "curves and factors (s)": sum(seconds.get(part, 0.0) for part in CURVES),
        "all (s)": run["allocate_seconds"],
        "ratio": run["allocate_seconds"] / first["allocate_seconds"],
        "GPU (GB)": max(one.get("gpu_peak_gb", 0.0) for one in held),
        "host, all processes (GB)": sum(one["host_gb"] for one in held),
    }
    if asked.whole and asked.layers:
        share = SHAPES[asked.model].num_hidden_layers / asked.layers
        found["all layers (s), extrapolated"] = run["allocate_seconds"] * share
    return found


if __name__ == "__main__":
    main()
