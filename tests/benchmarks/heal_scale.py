"""Tokens a second and memory of healing a random model of Llama-3-8B's shapes, on one GPU or several.

    python tests/benchmarks/heal_scale.py --steps 8 --tokens 300000 --output heal-scale-1.json
    torchrun --nproc-per-node 2 tests/benchmarks/heal_scale.py --steps 8 --tokens 600000 --output heal-scale-2.json
    torchrun --nproc-per-node 2 tests/benchmarks/heal_scale.py --parts --output heal-scale-2-parts.json

Weights and tokens are random; forms and dims are those of a plan at ``--budget``. What runs is the part of ``gac.heal``
that trains the whole model, on windows of 2048 tokens; where few ``--steps`` are due, they are of full size.
``--parts`` divides the models over the processes even where they fit. For a CPU: ``--shapes smollm2 --layers 2
--length 64 --tokens 4096 --device cpu``.
"""

import copy
import math
import time
from argparse import Namespace
from typing import Any

import torch

from gac.core.distributed.launch import local_rank
from gac.core.distributed.run import this_run
from gac.healing import run as run_module
from gac.healing import whole_model
from gac.healing.records import TrainingBudget, default_rate
from gac.healing.run import DistillationRun
from gac.healing.sharding import needs_sharding
from gac.healing.text import HealingText, held_out
from gac.models.modules import frozen
from gac.models.threads import entry_point
from gac_extensions.lab.shapes.models import model_of_shapes, planner_of_shapes, variant
from tests.benchmarks.harness import options, write

WINDOWS = 80


def main() -> None:
    parser = options(__doc__, "--output", "--profile", "--device")
    parser.add_argument("--shapes", default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="the model's own where not given")
    parser.add_argument("--budget", type=float, default=0.8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--steps", type=int, default=whole_model.STEPS, help="at least so many, by smaller batches")
    parser.add_argument("--parts", action="store_true")
    asked = parser.parse_args()
    whole_model.STEPS = asked.steps
    found = measured(asked)
    if this_run().leads:
        print(" ".join(f"{name}={value}" for name, value in found.items()))
        write(asked.output, **found)


@entry_point(every_rank=True)
def measured(asked: Namespace) -> dict[str, Any]:
    """What healing takes, from its second point on."""
    ranks = this_run()
    device = f"cuda:{local_rank()}" if asked.device == "cuda" else asked.device
    plan = planner_of_shapes(asked.shapes, (), asked.profile, asked.layers).plan(asked.budget)
    dense: Any = model_of_shapes(asked.shapes, device=device, layers=asked.layers)
    small: Any = copy.deepcopy(variant(dense, plan.weights))
    ids = torch.randint(dense.config.vocab_size, (WINDOWS, asked.length), generator=torch.Generator().manual_seed(0))
    out = held_out("random tokens", [len(ids)], asked.length)
    train, heldout = ids[~out], ids[out]
    text = HealingText(
        ("random",),
        train,
        torch.arange(len(train)),
        heldout,
        *(torch.ones(len(each)) for each in (train, heldout)),
        bos=False,
    )
    numbers = sum(one.params for one in plan.weights if one.changed)
    parts = ranks.count > 1 and (asked.parts or needs_sharding(small, numbers, ranks))
    run_module.INTERVAL = math.inf
    budget = TrainingBudget(None, asked.tokens, default_rate(plan.measured.params), 0.0, False, 0.0, 0)
    settings = plan, text, budget, run_module.CheckpointFile("scale"), ranks, time.monotonic(), False
    with frozen(dense), frozen(small):
        if parts:
            run = DistillationRun(small.to("cpu"), dense.to("cpu"), *settings)
            run.shard(ranks.mesh(asked.device))
        else:
            run = DistillationRun(small, dense, *settings)
        result = train(run)
    if result.failure is not None:
        raise result.failure
    points = [one for one in result.progress.curve if one.phase == "model"]
    read, seconds = (getattr(points[-1], name) - getattr(points[0], name) for name in ("tokens", "seconds"))
    peak = torch.cuda.max_memory_allocated() / 1e9 if asked.device == "cuda" else None
    return {
        "processes": ranks.count,
        "in_parts": parts,
        "length": asked.length,
        "kept": plan.budget.kept,
        "trained": run.trainables.count,
        "tokens_a_second": read / seconds,
        "peak_gb": ranks.gathered(peak),
    }


if __name__ == "__main__":
    main()
