"""The forms and dims that are chosen now beside those that were stored; exits with 1 where one differs.

    python tests/benchmarks/same_choices.py
    python tests/benchmarks/same_choices.py smollm2 nvidia-h200 fuse=auto     # the cases that these words name
    python tests/benchmarks/same_choices.py --store                           # where a change of choices is meant

SmolLM2's and Llama-3-8B's shapes with the shipped curves, both shipped tables, budgets from 0.9 to 0.5, with and
without limits on latency, weights apart, fused and as it comes out best. Stored
are every weight's form and dim, which sites share a GEMM, parameters and latencies, or that the case is refused. A
choice that was stored before it was proved optimal depends on the time that the solver was given: it is shown, and
does not count. All cases take about 20 minutes.
"""

import gzip
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from gac.core.errors import GacError
from gac.core.workloads import Workload
from gac_extensions.lab.shapes.models import planner_of_shapes
from gac_extensions.lab.shapes.versions import Planner
from tests.benchmarks.harness import options

STORED = Path(__file__).parent / "results" / "same-choices.json.gz"
PREFILL, DECODE = "prefill:1x1024", "decode:1@1024"
LATENCY: dict[str, dict[str, float]] = {"none": {}, "both": {PREFILL: 0.95, DECODE: 0.95}, "decode": {DECODE: 0.85}}
FORMS = ("low_rank", "narrow")


@dataclass(frozen=True)
class Case:
    model: str
    table: str
    fuse: Any
    latency: str
    budget: float

    def __str__(self) -> str:
        made = f"fuse={self.fuse} decode_kernel=torch latency={self.latency} budget={self.budget}"
        return f"{self.model} {self.table} {made}"


def cases() -> Iterator[Case]:
    tables = ("nvidia-h100-80gb-hbm3", "nvidia-h200")
    ways = product(("smollm2", "llama-3-8b"), tables, (False, True, "auto"), LATENCY)
    for model, table, fuse, latency in ways:
        if latency != "both" or not fuse:
            yield from (Case(model, table, fuse, latency, budget) for budget in (0.9, 0.8, 0.7, 0.6, 0.5))


@cache
def planner(model: str, table: str) -> Planner:
    return planner_of_shapes(model, [Workload.parse(PREFILL), Workload.parse(DECODE)], table)


def chosen(case: Case) -> dict[str, Any]:
    """What is compared; ``refused`` holds the message of a case that has no choice."""
    try:
        made: dict[str, Any] = {"fuse": case.fuse, "latency": LATENCY[case.latency]}
        plan = planner(case.model, case.table).plan(case.budget, forms=FORMS, **made)
    except GacError as failure:
        return {"refused": str(failure)}
    return {
        "choices": ["dense" if one.form == "dense" else f"{one.form}:{one.dim}" for one in plan.weights],
        "shared": [site.shared for site in plan.sites],
        "params": plan.budget.used,
        "ns": [one.plan_ns for one in plan.workloads],
        "dense_ns": [one.dense_ns for one in plan.workloads],
        "loss": plan.prediction.loss,
        "status": plan.certificate.status,
    }


def difference(stored: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs, in words; '' where nothing does."""
    if ("refused" in stored) != ("refused" in now):
        return f"refused: {now['refused']}" if "refused" in now else "a plan where there was none"
    moved = [
        f"weight {at}: {old} is {new}"
        for at, (old, new) in enumerate(zip(stored.get("choices", ()), now.get("choices", ()), strict=True))
        if old != new
    ]
    others = [name for name in ("shared", "params", "ns", "dense_ns") if stored.get(name) != now.get(name)]
    return "; ".join([*([f"{len(moved)} choices ({moved[0]})"] if moved else []), *others])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("words", nargs="*", help="compare only the cases that hold them all")
    parser.add_argument("--store", action="store_true", help="write what is chosen now, and compare nothing")
    asked = parser.parse_args()
    known = {} if asked.store else json.loads(gzip.decompress(STORED.read_bytes()))
    found, differ = {}, 0
    for case in cases():
        if not set(asked.words) <= set(str(case).split()):
            continue
        began = time.monotonic()
        found[str(case)] = now = chosen(case)
        unproved = known.get(str(case), {}).get("status") == "feasible"
        unlike = "" if asked.store else difference(known[str(case)], now)
        differ += bool(unlike) and not unproved
        verdict = f"{'unproved, ' if unproved else ''}{unlike or 'the same'}"
        figure = f"{now['params']:,}" if "params" in now else "refused"
        print(f"{time.monotonic() - began:6.1f} s  {case!s:<98} {figure:>15}  {verdict}", flush=True)
    if asked.store:
        STORED.write_bytes(gzip.compress(json.dumps(found).encode(), 9, mtime=0))
    print(f"{len(found)} cases, {differ} differ")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
