"""Starts of vLLM with compilation, of a plan for a model's shapes beside the dense model: seconds, cold and warm.

    python tests/benchmarks/engine_start.py --profile h200.jsonl --budgets 0.7 --output engine-start.json

Each start is a process of its own. A cold one finds empty caches of vLLM, Inductor and Triton; a warm one those that
the cold one left. The models are directories with a config alone. Needs vLLM beside GAC.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gac.core.workloads import Workload
from gac.models.shapes import shapes_of
from gac.plan.engines import VLLM
from gac_extensions.lab.shapes.models import planner_of_shapes
from tests.benchmarks.harness import options, write
from tests.benchmarks.in_vllm import WORKLOADS, write_config

CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
START = """
import os, sys, time
from vllm import LLM, SamplingParams
begun = time.monotonic()
llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=64)
taken = time.monotonic() - begun
sampling = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
llm.generate([{"prompt_token_ids": [*range(10, 300)]}], sampling, use_tqdm=False)
print("seconds", taken, flush=True)
os._exit(0)
"""


def seconds(model: Path, caches: Path) -> float:
    environment = os.environ | {name: str(caches / name) for name in CACHES} | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run([sys.executable, "-c", START, str(model)], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = options(__doc__, "--profile", "--budgets", "--output")
    parser.add_argument("--shapes", default="llama-3-8b")
    chosen = parser.parse_args()
    planner = planner_of_shapes(chosen.shapes, [*map(Workload.parse, WORKLOADS)], chosen.profile, engine=VLLM.name)
    plans = {"dense": None} | {str(budget): planner.plan_by_default(budget) for budget in chosen.budgets}
    starts = {}
    with tempfile.TemporaryDirectory() as work:
        for name, plan in plans.items():
            model, caches = Path(work, name), Path(work, f"caches-{name}")
            write_config(model, shapes_of(chosen.shapes), plan)
            starts[name] = {"cold": seconds(model, caches), "warm": seconds(model, caches)}
            print(f"{name}: {starts[name]['cold']:.1f} s cold, {starts[name]['warm']:.1f} s warm", flush=True)
    write(chosen.output, seconds=starts)


if __name__ == "__main__":
    main()
