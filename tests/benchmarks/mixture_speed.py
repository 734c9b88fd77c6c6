"""The speed in vLLM of a mixture with fewer and narrower experts, as its plan predicts it and as it is.

    gac profile --engine vllm --model QWEN3-30B-A3B --form experts --workload prefill:8x1024 --workload decode:16@1024 \
        -o table.jsonl
    python tests/benchmarks/mixture_speed.py QWEN3-30B-A3B --profile table.jsonl --output mixture.json

The model is a directory with a config. **Weights are random, and so are the losses of the choice**: each layer and each
of its widths and counts loses what a seed says, convex in both. So the plan says nothing of quality; what it is for is
the choice over all counts and widths of every layer (its time and its certificate), and its latencies. Tokens take
experts about evenly.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import transformers

from gac.allocation.decide import decide
from gac.allocation.problem import Problem
from gac.allocation.resolve import engine_steps
from gac.core.workloads import Workload
from gac.evaluation.engines.steps import _timed, config_of
from gac.forms import form_named
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.forms.planned_sites import as_planned, targeted_sites
from gac.models.sites import Site
from gac.plan.costs import fraction_of
from gac.plan.plan import Plan
from gac.plan.recipe import Recipe
from gac.profiling.records import Point
from gac.profiling.table import Profile
from tests.allocation.small_problems import MEASURED
from tests.benchmarks.harness import markdown, write

FORMS = ["experts"]
AutoConfig: Any = transformers.AutoConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--kept", type=float, default=0.75, help="of the routed experts' parameters")
    parser.add_argument("--workloads", nargs="+", default=["prefill:8x1024", "decode:16@1024"])
    parser.add_argument("--latency", type=float, nargs="+", default=[0.88, 0.88], help="of the dense model, in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    config = AutoConfig.from_pretrained(asked.model)
    limits = dict(zip(asked.workloads, asked.latency, strict=True))
    problem = made_up(config, Profile.load(asked.profile), asked.kept, limits, asked.seed)
    begun = time.monotonic()
    plan = decide(problem).plan
    seconds = time.monotonic() - begun
    print(f"chosen in {seconds:.2f} s: {plan.certificate}", flush=True)
    print(*sorted(counts_of(plan)), sep="\n", flush=True)
    predicted = {timed.workload: (timed.dense_ns, timed.plan_ns) for timed in plan.workloads}
    measured = {} if asked.plan_only else timed_in_vllm(config, plan, [*map(Workload.parse, asked.workloads)])
    rows = []
    for workload, (dense_ns, plan_ns) in predicted.items():
        row = {"workload": workload, "dense predicted ms": dense_ns / 1e6, "plan predicted ms": plan_ns / 1e6}
        if measured:
            dense, served, changed = (measured[name][workload] for name in ("dense", "served", "plan"))
            row |= {"dense ms": dense, "served ms": served, "plan ms": changed, "speed": dense / changed}
            row["predicted / measured"] = plan_ns / 1e6 / changed
        rows.append(row)
    print(markdown(list(rows[0]), [[f"{v:.3f}" if isinstance(v, float) else v for v in row.values()] for row in rows]))
    write(asked.output, seconds=seconds, certificate=str(plan.certificate), rows=rows, experts=counts_of(plan))


def made_up(config: Any, profile: Profile, kept: float, latency: Mapping[str, float], seed: int) -> Problem:
    """The choice of counts and widths alone; attentions stay dense."""
    sites = as_planned(targeted_sites(config, FORMS), FORMS, True)
    total = sum(site.params for site in sites)
    routed = sum(site.params for site in sites if site.weights[0].is_routed)
    budget = fraction_of(total - round((1 - kept) * routed), total)
    options = {"engine": "vllm", "workloads": [*latency], "latency": dict(latency), "refit": "none", "slack": 0}
    recipe = Recipe.of(budget, forms=FORMS, **options)
    recipe = replace(recipe, deployment=replace(recipe.deployment, fuse=True))
    steps = engine_steps(config, recipe.deployment, profile)
    measured = replace(MEASURED, params=2 * total)
    return Problem(sites, curves_of(sites, seed), profile, recipe, measured, steps=steps)


def curves_of(sites: Sequence[Site], seed: int) -> LossCurves:
    draw, curves = np.random.default_rng(seed), {}
    for stack in (site.weights[-1] for site in sites if site.weights[-1].experts):
        level, by_count, by_width = draw.lognormal(-6, 0.7), *draw.uniform(0.3, 1.5, 2)
        gone = 1 - np.arange(stack.experts + 1) / stack.experts
        for form in form_named("experts").variants(stack):
            thinner = 1 - form.routed_sizes(stack, stack.experts)[1] / stack.expert_width
            loss = level * (by_count * gone**1.5 + by_width * thinner**1.5)
            curves[form.name, "bf16", stack.name] = LossCurve(loss)
    return LossCurves(curves)


def counts_of(plan: Plan) -> list[tuple[str, int, int]]:
    sizes = [(choice.name, choice.module.sizes) for choice in plan.weights if choice.weight.experts and choice.changed]
    return [(name, size["experts"], size["width"]) for name, size in sizes]


def timed_in_vllm(config: Any, plan: Plan, workloads: Sequence[Workload]) -> dict[str, dict[str, float]]:
    """Medians in ms by model and workload: vLLM's class, GAC's of the same sizes, and of the plan."""
    modules = {
        choice.name: {
            "form": choice.form,
            "dim": choice.dim,
            "module": choice.module.module,
            "sizes": dict(choice.module.sizes),
        }
        for choice in plan.weights
        if choice.changed
    }
    configs = {
        "dense": config_of(config, served=False),
        "served": config_of(config, served=True),
        "plan": config_of(config, served=True, modules=modules),
    }
    points = {workload: Point(("step", ()), "bf16") for workload in workloads}  # type: ignore[arg-type]
    measured: dict[str, dict[str, float]] = {}
    for name, values in configs.items():
        times = [median(ms) for _, ms in _timed(name, values, points, "bf16", None)]
        measured[name] = dict(zip(map(str, workloads), times, strict=True))
        print(name, measured[name], flush=True)
    return measured


if __name__ == "__main__":
    main()
