"""A model's shapes in uniform schemes in vLLM, beside the dense model and vLLM's own schemes; random weights.

    python tests/benchmarks/schemes_in_vllm.py --schemes w4a16 fp8 --own w4a16 fp8 --output schemes-in-vllm.json

The models are directories with a config alone. vLLM's own are named with its name: ``w4a16`` is symmetric in groups of
128 as compressed-tensors has it, ``fp8`` rounds inputs as they come. Needs vLLM beside GAC, or ``--engine-python``.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gac.core.io import to_json
from gac.evaluation.engines.bench import bench_engine
from gac.evaluation.engines.steps import config_of, stored_modules
from gac.models.shapes import shapes_of
from gac.schemes import scheme_named
from tests.benchmarks.harness import options, write
from tests.benchmarks.in_vllm import OPTIONS, WORKLOADS

_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
OWN: Mapping[str, Mapping[str, Any]] = {
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
        "ignore": ["lm_head"],
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}
"""vLLM's own, by name: ``quantization_config``."""


def main() -> None:
    parser = options(__doc__, "--output")
    parser.add_argument("--shapes", default="llama-3-8b")
    parser.add_argument("--schemes", nargs="*", default=["w4a16", "fp8"])
    parser.add_argument("--own", nargs="*", choices=list(OWN), default=list(OWN), help="vLLM's own")
    parser.add_argument("--workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--engine-python", type=Path)
    parser.add_argument("--engine-options", nargs="*", default=OPTIONS)
    chosen = parser.parse_args()
    shapes: Any = shapes_of(chosen.shapes)
    configs = {"dense": config_of(shapes, served=False)}
    for name in chosen.schemes:
        configs[name.replace(":", "-")] = config_of(shapes, True, stored_modules(shapes, scheme_named(name)))
    configs |= {f"vllm-{name}": configs["dense"] | {"quantization_config": OWN[name]} for name in chosen.own}
    with tempfile.TemporaryDirectory() as work:
        for name, config in configs.items():
            folder = Path(work, name)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config, default=asdict), encoding="utf-8")
        bench = bench_engine(
            [str(Path(work, name)) for name in configs],
            workloads=chosen.workloads,
            options=chosen.engine_options,
            python=chosen.engine_python,
        )
    print(bench)
    write(chosen.output, bench=json.loads(to_json(bench)))


if __name__ == "__main__":
    main()
