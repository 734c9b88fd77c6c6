"""Predicted beside measured loss of random plans of SmolLM2, and how well the one ranks the other.

    python tests/benchmarks/prediction.py --output tests/benchmarks/results/prediction.json

A random plan is the exact choice at a random budget over loss curves of which every weight's were multiplied by a
random number (log-normal, its sigma random too, from 0 to 2): plans of every kind between the best one and a poor one.
What a plan is predicted to lose is read off the true curves. A run that is cut short goes on where it was. With
``--schemes`` budgets are of the bytes, not of the parameters.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from gac.allocation.decide import decide
from gac.allocation.problem import Problem
from gac.forms import DEFAULT_FORMS, form_named
from gac.forms.loss_curves import LossCurve, LossCurves
from gac.plan.plan import Plan, WeightChoice
from gac.schemes import DEFAULT_SCHEME
from tests.benchmarks.harness import OF_A_STUDY, Study, options, problem_of

CORRELATION = "rank_correlation"


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--refit")
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="seed of the first, for several runs at a time")
    parser.add_argument("--budgets", type=float, nargs=2, default=(0.55, 0.97), metavar=("LEAST", "MOST"))
    parser.add_argument("--forms", nargs="*", default=list(DEFAULT_FORMS))
    parser.add_argument("--schemes", nargs="*", default=[DEFAULT_SCHEME])
    parser.set_defaults(windows=40, refit="none")
    asked = parser.parse_args()
    study = Study(asked, "first", "budgets", "refit", "forms", "schemes")
    planned = {"profile": asked.profile, "workloads": ["prefill:1x1024"], "refit": asked.refit, "forms": asked.forms}
    problem = problem_of(study.loaded, calibration=asked.calibration, schemes=asked.schemes, **planned)
    for seed in range(asked.first + len(study.rows), asked.first + asked.plans):
        plan, sigma = random_plan(problem, seed, asked.budgets)
        row = (
            {"seed": seed, "sigma": sigma, "forms": Counter(one.form for one in plan.weights)}
            | {"schemes": Counter(one.scheme for one in plan.weights)}
            | study.measured(plan)
            | {"predicted": true_loss(problem, plan)}
        )
        study.keep(row, **{CORRELATION: correlation([*study.rows, row])})
    print(f"rank correlation over {len(study.rows)} plans: {correlation(study.rows):.4f}")


def random_plan(problem: Problem, seed: int, budgets: tuple[float, float]) -> tuple[Plan, float]:
    """A plan, and the sigma of the logarithm of what its curves were multiplied by."""
    random = np.random.default_rng(seed)
    budget, sigma = float(random.uniform(*budgets)), float(random.uniform(0, 2))

    def disturbed(curve: LossCurve) -> LossCurve:
        return LossCurve(float(np.exp(sigma * random.standard_normal())) * curve.loss)

    curves = LossCurves({key: disturbed(curve) for key, curve in problem.curves.by_key.items()})
    limits, exact = problem.recipe.limits, problem.recipe.space.schemes == (DEFAULT_SCHEME,)
    limits = replace(limits, params=budget) if exact else replace(limits, memory=budget)
    recipe = replace(problem.recipe, limits=limits)
    return decide(replace(problem, curves=curves, recipe=recipe)).plan, sigma


def true_loss(problem: Problem, plan: Plan) -> float:
    """What the undisturbed curves say that a plan loses, nats a token."""
    alone = sum(_lost(problem.curves, one) for one in plan.weights)
    return alone + problem.curves.beyond_sum((one.form, one.name, one.dim) for one in plan.weights)


def _lost(curves: LossCurves, one: WeightChoice) -> float:
    """What one weight loses; that through which a form shortens others loses what all of them do."""
    form, (around, dim) = form_named(one.form), form_named(one.form).shortening(one.dim)
    curve = curves.of(form, one.weight, one.scheme)
    shorter = curves.of(around, one.weight, one.scheme) if form.parent_form_name else None
    return sum(float(found.loss[at]) for found, at in ((curve, one.dim), (shorter, dim)) if found is not None)


def correlation(rows: list[dict[str, Any]]) -> float | None:
    if len(rows) < 2:
        return None
    return float(spearmanr([row["predicted"] for row in rows], [row["measured"] for row in rows]).statistic)


if __name__ == "__main__":
    main()
