"""What the slack buys: plans made by default beside those of least loss, from the shipped curves and a table.

python tests/benchmarks/slack.py [--shapes smollm2] [--profile nvidia-h100-80gb-hbm3] [--budgets 0.9 0.8 0.7 0.6]
    [--align 8] [--apart]

The last columns are seconds of CPU: for the whole plan, and for each of the two exact solutions, the shortest of three.
"""

import time
from typing import Any

from gac.allocation.decide import decide
from gac.allocation.problem import Instance
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS
from gac_extensions.lab.shapes.models import planner_of_shapes
from tests.benchmarks.harness import markdown, options

WORKLOADS = ("prefill:1x1024", "decode:1@1024")
REPEATS = 3


def main() -> None:
    parser = options(__doc__, "--profile", "--budgets")
    parser.add_argument("--shapes", default="smollm2")
    parser.add_argument("--align", type=int, help="dims are multiples of it; sound dims where not given")
    parser.add_argument("--apart", action="store_true", help="no GEMM is shared")
    asked = parser.parse_args()
    planner = planner_of_shapes(asked.shapes, [Workload.parse(one) for one in WORKLOADS], asked.profile)
    wanted: dict[str, Any] = {
        "forms": DEFAULT_FORMS,
        "fuse": False if asked.apart else "auto",
        "align": asked.align or True,
    }
    rows = []
    for budget in asked.budgets:
        began = time.process_time()
        decision = decide(planner.problem_of(budget, **wanted, latency=None, slack=None))
        plan, took = decision.plan, time.process_time() - began
        speed, faster = plan.speed, decision.faster
        assert speed is not None, "the table lacks latencies"
        assert faster is not None
        row = [f"{budget:g}", f"{plan.prediction.loss / (speed.loss or 1):.4f}"]
        for one, least in zip(plan.workloads, speed.latency_ns, strict=True):
            row += [f"{one.plan_ns / one.dense_ns:.3f}", f"{least / one.dense_ns:.3f}"]
        solved = [f"{shortest(one):.3f}" for one in (decision.instance, faster[0])]
        rows.append([*row, plan.certificate.status, speed.certificate.status, f"{took:.1f}", *solved])
    beside = [column for workload in WORKLOADS for column in (workload, "at the least loss")]
    seconds = ["s", "least loss, s", "fastest, s"]
    print(markdown(["kept", "loss, of the least", *beside, "least loss", "fastest", *seconds], rows))


def shortest(instance: Instance) -> float:
    """Seconds of CPU that solving it takes."""
    samples = []
    for _ in range(REPEATS):
        began = time.process_time()
        instance.solve()
        samples.append(time.process_time() - began)
    return min(samples)


if __name__ == "__main__":
    main()
