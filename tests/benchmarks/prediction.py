"""Predicted beside measured loss of random plans of SmolLM2, and how well the one ranks the other.

    python tests/benchmarks/prediction.py --output tests/benchmarks/results/prediction.json

A random plan is the exact choice at a random budget over loss curves of which every weight's were multiplied by a
random number (log-normal, its sigma random too, from 0 to 2): plans of every kind between the best one and a poor one.
What a plan is predicted to lose is read off the true curves. A run that is cut short goes on where it was.
"""

import argparse
import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from reading import machine, measured, read
from scipy.stats import spearmanr

import gac
from gac.allocation.problem import Problem, decide
from gac.curves import LossCurve, LossCurves
from gac.forms import form_named
from gac.io import atomic_path
from gac.plan import Plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--calibration", default="wiki-sample:64x1024")
    parser.add_argument("--profile", default="nvidia-h100-80gb-hbm3")
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--budgets", type=float, nargs=2, default=(0.55, 0.97), metavar=("LEAST", "MOST"))
    parser.add_argument("--refit", choices=("residual", "update", "none"), default="none")
    parser.add_argument("--windows", type=int, default=40, help="evaluation windows")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    loaded = read(asked.model)
    problem = measured(loaded, asked.calibration, asked.profile, "prefill:1x1024", asked.refit)
    settings = {name: str(value) for name, value in vars(asked).items() if name not in ("plans", "output")}
    rows: list[dict[str, Any]] = []
    if asked.output.exists() and (before := json.loads(asked.output.read_text()))["settings"] == settings:
        rows = before["rows"]
    dense = gac.perplexity(loaded.model, loaded.tokenizer, windows=asked.windows, progress=False).value
    for seed in range(len(rows), asked.plans):
        plan, sigma = random_plan(problem, seed, asked.budgets)
        model = gac.compress(copy.deepcopy(loaded.model), plan, tokenizer=loaded.tokenizer, progress=False)
        found = gac.perplexity(model, loaded.tokenizer, windows=asked.windows, progress=False).value
        row = {"seed": seed, "kept": plan.budget.kept, "sigma": sigma, "predicted": true_loss(problem, plan)}
        rows.append(row | {"measured": math.log(found / dense)})
        print(" ".join(f"{name}={value:.4g}" for name, value in rows[-1].items()), flush=True)
        write(asked.output, settings, dense, rows)
    print(f"rank correlation over {len(rows)} plans: {correlation(rows):.4f}")


def random_plan(problem: Problem, seed: int, budgets: tuple[float, float]) -> tuple[Plan, float]:
    """A plan, and the sigma of the logarithm of what its curves were multiplied by."""
    random = np.random.default_rng(seed)
    budget, sigma = float(random.uniform(*budgets)), float(random.uniform(0, 2))

    def disturbed(curve: LossCurve) -> LossCurve:
        return LossCurve(float(np.exp(sigma * random.standard_normal())) * curve.loss)

    curves = LossCurves({key: disturbed(curve) for key, curve in problem.curves.by_key.items()})
    limits = replace(problem.recipe.limits, params=budget)
    recipe = replace(problem.recipe, limits=limits)
    return decide(replace(problem, curves=curves, recipe=recipe)).plan, sigma


def true_loss(problem: Problem, plan: Plan) -> float:
    """What the undisturbed curves say that a plan loses, nats a token."""
    chosen = [(problem.curves.of(form_named(w.form), w.weight), w.dim) for w in plan.weights if w.form != "dense"]
    return float(sum(curve.loss[dim] for curve, dim in chosen if curve is not None))


def correlation(rows: list[dict[str, Any]]) -> float:
    return float(spearmanr([row["predicted"] for row in rows], [row["measured"] for row in rows]).statistic)


def write(output: Path, settings: dict[str, str], dense: float, rows: list[dict[str, Any]]) -> None:
    result = {
        "settings": settings,
        **machine(),
        "dense": dense,
        "rank_correlation": correlation(rows) if len(rows) > 1 else None,
        "rows": rows,
    }
    with atomic_path(output) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
