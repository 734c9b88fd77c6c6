"""Plans for a model's shapes beside the dense model, in vLLM: random weights, CUDA graphs, no compilation.

    gac profile --engine vllm --model llama-3-8b --workload prefill:8x1024 --workload decode:1@1024 \\
        --workload decode:16@1024 --workload decode:64@1024 --passes 1 -o h200.jsonl
    python tests/benchmarks/in_vllm.py --profile h200.jsonl --budgets 0.85 0.7 0.5 --output in-vllm.json

The models are directories with a config alone. ``narrow`` is the plan of narrower MLPs alone at the middle budget. Loss
curves are SmolLM2's. Needs vLLM beside GAC, or ``--engine-python``.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

from gac.checkpoint.header import header_of
from gac.core.io import to_json
from gac.core.workloads import Workload
from gac.evaluation.engines.bench import bench_engine
from gac.evaluation.engines.steps import config_of
from gac.models.shapes import Shapes, shapes_of
from gac.plan.engines import VLLM
from gac.plan.plan import Plan
from gac_extensions.lab.shapes.models import planner_of_shapes
from tests.benchmarks.harness import options, write

WORKLOADS = ("prefill:8x1024", "decode:1@1024", "decode:16@1024", "decode:64@1024")
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 16, 64]}
OPTIONS = ["load_format=dummy", "dtype=bfloat16", "max_num_batched_tokens=8192"]
OPTIONS.append(f"compilation_config={json.dumps(GRAPHS)}")


def write_config(folder: Path, config: Any, plan: Plan | None) -> None:
    """Write the config of the dense model, ``Shapes`` or a config, or of what a plan makes of it."""
    values = config_of(config, served=plan is not None)
    if plan is not None:
        dense = transformers.AutoConfig.for_model(**asdict(config)) if isinstance(config, Shapes) else config
        values["gac"] = header_of(plan, dense, "")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values, default=asdict), encoding="utf-8")


def main() -> None:
    parser = options(__doc__, "--profile", "--budgets", "--output")
    parser.add_argument("--shapes", default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--engine-python", type=Path)
    parser.add_argument("--engine-options", nargs="*", default=OPTIONS)
    chosen = parser.parse_args()
    runs = list(map(Workload.parse, chosen.workloads))
    planner = planner_of_shapes(chosen.shapes, runs, chosen.profile, chosen.layers, engine=VLLM.name)
    shapes: Any = shapes_of(chosen.shapes)
    if chosen.layers:
        shapes = Shapes(**asdict(shapes) | {"num_hidden_layers": chosen.layers})
    middle = sorted(chosen.budgets)[len(chosen.budgets) // 2]
    plans: dict[str, Plan | None] = {"dense": None}
    plans |= {f"default-{budget}": planner.plan_by_default(budget) for budget in chosen.budgets}
    plans[f"narrow-{middle}"] = planner.plan_by_default(middle, forms=("narrow",))
    with tempfile.TemporaryDirectory() as work:
        folders = {name: Path(work, name) for name in plans}
        for name, plan in plans.items():
            write_config(folders[name], shapes, plan)
        bench = bench_engine(
            list(map(str, folders.values())),
            workloads=chosen.workloads,
            options=chosen.engine_options,
            python=chosen.engine_python,
        )
    print(bench)
    predicted = {
        name: {timed.workload: asdict(timed) for timed in plan.workloads} for name, plan in plans.items() if plan
    }
    write(chosen.output, predicted=predicted, bench=json.loads(to_json(bench)))


if __name__ == "__main__":
    main()
