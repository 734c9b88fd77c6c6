"""Perplexity of SmolLM2 at four budgets, beside uniform SVD-LLM on the same text, and the fit of the loss factor.

    python tests/benchmarks/quality.py --output tests/benchmarks/results/quality.json

Runs on the GPU where there is one. ``--windows`` shortens the evaluation; ratios are always of the same windows.
"""

import argparse
import copy
import json
import math
from pathlib import Path
from typing import Any

from reading import machine, read

import gac
from gac.io import atomic_path
from gac.models.loading import Loaded
from gac.plan import Plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--calibration", default="wiki-sample:64x1024")
    parser.add_argument("--profile", default="nvidia-h100-80gb-hbm3")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.9, 0.8, 0.7, 0.6])
    parser.add_argument("--baseline-budgets", type=float, nargs="*", default=[0.9, 0.8, 0.7, 0.6])
    parser.add_argument("--refit", choices=("residual", "update", "none"), help="of GAC's plans")
    parser.add_argument("--windows", type=int, help="evaluation windows; all where not given")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    loaded = read(asked.model)
    dense = gac.perplexity(loaded.model, loaded.tokenizer, windows=asked.windows)
    print(f"dense {dense}")
    rows: list[dict[str, Any]] = []
    cases = [("gac kfac", "kfac", "loss", asked.refit, budget) for budget in asked.budgets]
    cases += [("uniform svd-llm", "svd-llm", "uniform", None, budget) for budget in asked.baseline_budgets]
    for name, method, rule, refit, budget in cases:
        plan = allocate(loaded, budget, asked, method, rule, refit)
        rows.append(measured(loaded, plan, name, dense.value, asked.windows))
        write(asked, dense, rows)
    factors = [row["measured"] / row["predicted"] for row in rows if row["allocation"] == "gac kfac"]
    print(f"measured / predicted ln(ppl ratio): {', '.join(f'{factor:.3f}' for factor in factors)}")


def write(asked: argparse.Namespace, dense: gac.Perplexity, rows: list[dict[str, Any]]) -> None:
    result = {
        "model": asked.model,
        "calibration": asked.calibration,
        "protocol": dense.protocol,
        **machine(),
        "dense": dense.value,
        "rows": rows,
    }
    with atomic_path(asked.output) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")


def allocate(
    loaded: Loaded, budget: float, asked: argparse.Namespace, method: str, rule: str, refit: str | None
) -> Plan:
    return gac.allocate(
        loaded.model,
        budget,
        profile=asked.profile,
        method=method,
        rule=rule,
        refit=refit,
        calibration=asked.calibration,
        tokenizer=loaded.tokenizer,
    )


def measured(loaded: Loaded, plan: Plan, name: str, dense: float, windows: int | None) -> dict[str, Any]:
    model = gac.compress(copy.deepcopy(loaded.model), plan, tokenizer=loaded.tokenizer)
    found = gac.perplexity(model, loaded.tokenizer, windows=windows)
    row = {
        "allocation": name,
        "refit": plan.recipe.refit,
        "budget": plan.budget.asked,
        "kept": plan.budget.kept,
        "used": plan.budget.used,
        "limit": plan.budget.limit,
        "aligned": plan.aligned_fraction,
        "alignment": plan.alignment,
        "perplexity": found.value,
        "ratio": found.value / dense,
        "measured": math.log(found.value / dense),
        "predicted": plan.prediction.loss,
        "certificate": plan.certificate.status,
    }
    print(
        " ".join(f"{key}={value:.4f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items())
    )
    return row


if __name__ == "__main__":
    main()
