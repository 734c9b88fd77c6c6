"""Bytes of a compressed checkpoint beside those of its parameters, and seconds to load it beside the dense model's.

    python tests/benchmarks/bench_checkpoint.py --output tests/benchmarks/results/checkpoint.json

Each load is a process of its own, dense and compressed in turns, files in the page cache; the time is that of the
call, without imports. The plan is made from little text: what is measured is its directory, not its quality.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import gac
from gac.files import atomic_path
from gac.models.loading import load_model

LOAD = """
import sys, time
import torch, gac, gac.api, pydantic.type_adapter
from transformers import AutoModelForCausalLM
way, place, device = sys.argv[1:]
began = time.perf_counter()
if way == "gac.load":
    model = gac.load(place)
else:
    model = AutoModelForCausalLM.from_pretrained(place).to(device)
if device == "cuda":
    torch.cuda.synchronize()
print(time.perf_counter() - began)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--budget", type=float, default=0.8)
    parser.add_argument("--calibration", default="wiki-sample:2x256")
    parser.add_argument("--loads", type=int, default=7, help="of each kind")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dense, small = Path(folder) / "dense", Path(folder) / "small"
        size = written(asked, dense, small)
        times = loading_times({"dense": dense, "from_pretrained": small, "gac.load": small}, asked.loads)
    medians = {way: statistics.median(found) for way, found in times.items()}
    result = {
        "model": asked.model,
        "budget": asked.budget,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}",
        "versions": {"gac": gac.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "bytes": size,
        "seconds": times,
        "over_dense": {way: seconds / medians["dense"] for way, seconds in medians.items()},
    }
    with atomic_path(asked.output) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    over = size["directory"] / size["parameters"] - 1
    print(f"{size['directory']:,} bytes, {over:.3%} over its parameters; with the tokenizer {size['with_tokenizer']:,}")
    print(", ".join(f"{way} {seconds:.3f} s" for way, seconds in medians.items()))


def written(asked: argparse.Namespace, dense: Path, small: Path) -> dict[str, int]:
    """Both directories, and the bytes of the compressed one."""
    whole = load_model(asked.model)
    whole.model.to(torch.bfloat16).save_pretrained(dense)
    loaded = load_model(str(dense), whole.tokenizer)
    options: dict[str, Any] = {"tokenizer": loaded.tokenizer, "progress": False}
    plan = gac.allocate(
        loaded.model,
        asked.budget,
        profile="nvidia-h100-80gb-hbm3",
        calibration=asked.calibration,
        refit="none",
        **options,
    )
    model = gac.compress(loaded.model, plan, **options)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(small)
    alone = sum(file.stat().st_size for file in small.iterdir())
    loaded.tokenizer.save_pretrained(small)
    with_tokenizer = sum(file.stat().st_size for file in small.iterdir())
    return {"parameters": parameters, "directory": alone, "with_tokenizer": with_tokenizer}


def loading_times(places: dict[str, Path], loads: int) -> dict[str, list[float]]:
    """Seconds of each load; the first of each kind, which fills the page cache, does not count."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    times: dict[str, list[float]] = {way: [] for way in places}
    for load in range(loads + 1):
        for way, place in places.items():
            command = [sys.executable, "-c", LOAD, way, str(place), device]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if load:
                times[way].append(float(done.stdout.split()[-1]))
    return times


if __name__ == "__main__":
    main()
