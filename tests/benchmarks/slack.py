"""What the slack buys: plans made by default beside those of least loss, from the shipped curves and a table.

python tests/benchmarks/slack.py [--shapes smollm2] [--profile nvidia-h100-80gb-hbm3] [--budgets 0.9 0.8 0.7 0.6]
"""

import time

from gac.evaluation.shapes import planner_of_shapes
from gac.workloads import Workload
from tests.benchmarks.harness import markdown, options

WORKLOADS = ("prefill:1x1024", "decode:1@1024")


def main() -> None:
    parser = options(__doc__, "--profile", "--budgets")
    parser.add_argument("--shapes", default="smollm2")
    asked = parser.parse_args()
    planner = planner_of_shapes(asked.shapes, [Workload.parse(one) for one in WORKLOADS], asked.profile)
    rows = []
    for budget in asked.budgets:
        began = time.monotonic()
        plan = planner.plan_by_default(budget)
        speed, took = plan.speed, time.monotonic() - began
        assert speed is not None, "the table lacks latencies"
        row = [f"{budget:g}", f"{plan.prediction.loss / (speed.loss or 1):.4f}"]
        for one, least in zip(plan.workloads, speed.latency_ns, strict=True):
            row += [f"{one.plan_ns / one.dense_ns:.3f}", f"{least / one.dense_ns:.3f}"]
        rows.append([*row, plan.certificate.status, speed.certificate.status, f"{took:.1f}"])
    beside = [column for workload in WORKLOADS for column in (workload, "at the least loss")]
    print(markdown(["kept", "loss, of the least", *beside, "least loss", "fastest", "s"], rows))


if __name__ == "__main__":
    main()
