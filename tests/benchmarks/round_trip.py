"""SmolLM2 compressed, saved, and opened in each of the three ways in a process of its own: does it say the same?

    python -m tests.benchmarks.round_trip --output tests/benchmarks/results/round-trip-smollm2-cpu.json

Logits are compared bit for bit, greedy tokens one by one, with the KV cache and without, in float32 and in bfloat16,
with those of the model before it was saved. The bytes of each directory are set beside those of the parameters.

The plan's calibration is taken again where its statistics are not kept. On a CPU give it a plan of few windows:

    gac allocate smollm2 --budget 0.8 --calibration wiki-sample:8x1024 --refit none -o plan.json
    python -m tests.benchmarks.round_trip --plan plan.json --output round-trip.json
"""

import argparse
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import gac
from gac.io import atomic_path
from gac.models.loading import load_tokenizer
from tests.checkpoint.test_three_ways import WAYS, answers

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature on a mountain, because",
    "List three fruits:",
)
OPEN = f"""
import sys
from typing import Any
import torch
from safetensors.torch import load_file, save_file

{inspect.getsource(answers)}

place, prompts, said, way = sys.argv[1:]
exec(way)
model = load(place)
found = {{}}
for name, ids in load_file(prompts).items():
    found |= {{f"{{name}} {{key}}": value for key, value in answers(model, ids).items()}}
save_file(found, said)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=Path("notebooks/plans/gac.json"))
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    plan = gac.Plan.load(asked.plan)
    tokenizer = load_tokenizer(plan.measured.model)
    prompts = {str(at): tokenizer(text, return_tensors="pt").input_ids for at, text in enumerate(PROMPTS)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(prompts, folder / "prompts")
        model: Any = gac.compress(plan.measured.model, plan)
        rows = [tried(model, folder / "float32", prompts, tokenizer)]
        model = AutoModelForCausalLM.from_pretrained(folder / "float32", dtype=torch.bfloat16)
        rows.append(tried(model, folder / "bfloat16", prompts, tokenizer))
    result = {
        "command": f"python -m tests.benchmarks.round_trip --plan {asked.plan}",
        "model": plan.measured.model,
        "kept": plan.budget.kept,
        "device": f"CPU, {platform.machine()}",
        "versions": versions(),
        "prompts": PROMPTS,
        "rows": rows,
    }
    with atomic_path(asked.output) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


def tried(model: Any, place: Path, prompts: dict[str, Tensor], tokenizer: Any) -> dict[str, Any]:
    """What a model says before it is saved beside what each way to open it says; and the directory's bytes."""
    expected = {f"{name} {key}": value for name, ids in prompts.items() for key, value in answers(model, ids).items()}
    model.save_pretrained(place)
    row: dict[str, Any] = {"dtype": place.name, **sizes(model, place)}
    tokenizer.save_pretrained(place)
    row["cache_changes_no_token"] = all(
        torch.equal(expected[f"{name} cached"], expected[f"{name} uncached"]) for name in prompts
    )
    row["ways"] = {way: compared(expected, in_a_fresh_process(code, place)) for way, code in WAYS.items()}
    return row


def sizes(model: Any, place: Path) -> dict[str, Any]:
    """Bytes of the parameters, each once, and of the directory without a tokenizer."""
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    directory = sum(file.stat().st_size for file in place.iterdir())
    return {"parameter_bytes": parameters, "directory_bytes": directory, "over": directory / parameters - 1}


def in_a_fresh_process(way: str, place: Path) -> dict[str, Tensor]:
    """What the directory says there."""
    said = place.parent / "said"
    environment = os.environ | {"HF_MODULES_CACHE": str(place.parent / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", OPEN, str(place), str(place.parent / "prompts"), str(said), way]
    subprocess.run(command, env=environment, check=True)
    return load_file(said)


def compared(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, bool]:
    """Whether all logits and all tokens are the same."""
    assert found.keys() == expected.keys()
    return {
        kind: all(torch.equal(found[name], expected[name]) for name in expected if name.endswith(f" {kind}"))
        for kind in ("logits", "cached", "uncached")
    }


def versions() -> dict[str, str]:
    return {
        "gac": gac.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
