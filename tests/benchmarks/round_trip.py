"""SmolLM2 compressed, saved, and opened in each of the three ways in a process of its own: does it say the same?

    python -m tests.benchmarks.round_trip --output tests/benchmarks/results/round-trip-smollm2-cpu.json

Logits are compared bit for bit, greedy tokens one by one, with the KV cache and without, in float32 and in bfloat16,
with those of the model before it was saved. The bytes of each directory are set beside those of the parameters.

The plan's calibration is taken again where its statistics are not kept. On a CPU give it a plan of few windows:

    gac allocate smollm2 --budget 0.8 --calibration wiki-sample:8x1024 --refit none -o plan.json
    python -m tests.benchmarks.round_trip --plan plan.json --output round-trip.json
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import gac
from gac.models.loading import load_tokenizer
from tests.benchmarks.harness import options, write
from tests.checkpoint.test_three_ways import WAYS

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature on a mountain, because",
    "List three fruits:",
)
KINDS = ("logits", "cached", "uncached")


def answers(model: Any, prompts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits, and greedy tokens with the KV cache and without, of each prompt."""
    found = {}
    with torch.no_grad():
        for name, ids in prompts.items():
            given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
            found[f"{name} logits"] = model(input_ids=ids).logits.contiguous()
            found[f"{name} cached"] = model.generate(ids, **given)
            found[f"{name} uncached"] = model.generate(ids, **given, use_cache=False)
    return found


OPEN = f"""
import sys
from typing import Any
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

{inspect.getsource(answers)}

place, prompts, said, way = sys.argv[1:]
exec(way)
save_file(answers(load(place), load_file(prompts)), said)
"""


def main() -> None:
    parser = options(__doc__, "--output")
    parser.add_argument("--plan", type=Path, default=Path("notebooks/plans/gac.json"))
    asked = parser.parse_args()
    plan = gac.Plan.load(asked.plan)
    tokenizer = load_tokenizer(plan.measured.model)
    prompts = {str(at): tokenizer(text, return_tensors="pt").input_ids for at, text in enumerate(PROMPTS)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(prompts, folder / "prompts")
        model: Any = gac.compress(plan.measured.model, plan, heal=0)
        rows = [tried(model, folder / "float32", prompts, tokenizer)]
        model = AutoModelForCausalLM.from_pretrained(folder / "float32", dtype=torch.bfloat16)
        rows.append(tried(model, folder / "bfloat16", prompts, tokenizer))
    write(asked.output, model=plan.measured.model, kept=plan.budget.kept, prompts=PROMPTS, rows=rows)
    print(json.dumps(rows, indent=1))


def tried(model: Any, place: Path, prompts: dict[str, Tensor], tokenizer: Any) -> dict[str, Any]:
    """What a model says before it is saved beside what each way to open it says; and its bytes and the directory's."""
    expected = answers(model, prompts)
    model.save_pretrained(place)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    directory = sum(file.stat().st_size for file in place.iterdir())
    tokenizer.save_pretrained(place)
    return {
        "dtype": place.name,
        "parameter_bytes": parameters,
        "directory_bytes": directory,
        "over": directory / parameters - 1,
        "cache_changes_no_token": all(
            torch.equal(expected[f"{name} cached"], expected[f"{name} uncached"]) for name in prompts
        ),
        "ways": {way: compared(expected, in_a_fresh_process(code, place)) for way, code in WAYS.items()},
    }


def in_a_fresh_process(way: str, place: Path) -> dict[str, Tensor]:
    """What the directory says there."""
    said = place.parent / "said"
    environment = os.environ | {"HF_MODULES_CACHE": str(place.parent / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", OPEN, str(place), str(place.parent / "prompts"), str(said), way]
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True)
    return load_file(said)


def compared(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, bool]:
    """Whether all logits and all tokens are the same."""
    assert found.keys() == expected.keys()
    return {
        kind: all(torch.equal(found[name], expected[name]) for name in expected if name.endswith(f" {kind}"))
        for kind in KINDS
    }


if __name__ == "__main__":
    main()
