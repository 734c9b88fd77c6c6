"""Perplexity of SmolLM2 at four budgets, beside uniform SVD-LLM on the same text, and the fit of the loss factor.

    python tests/benchmarks/quality.py --output tests/benchmarks/results/quality.json

Every row has ln(ppl / dense) on three texts and their geometric mean; the fit is of the first text. Runs on the GPU
where there is one. ``--windows`` shortens the evaluation; ratios are always of the same windows.
"""

from gac.plan.recipe import DEFAULT_TEXT
from tests.benchmarks.harness import OF_A_STUDY, OPTIONS, Study, options


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets", "--refit")
    parser.set_defaults(calibration=[*DEFAULT_TEXT])
    parser.add_argument("--baseline-budgets", **OPTIONS["--budgets"])
    parser.add_argument("--least-loss", action="store_true", help="give no loss for speed")
    asked = parser.parse_args()
    study = Study(asked, "least_loss", speed=not asked.least_loss)
    for budget in asked.budgets:
        study.add({"allocation": "gac kfac"}, budget, method="kfac", rule="loss", refit=asked.refit)
    for budget in asked.baseline_budgets:
        study.add({"allocation": "uniform svd-llm"}, budget, method="svd-llm", rule="uniform")
    factors = [row["measured"] / row["predicted"] for row in study.rows if row["allocation"] == "gac kfac"]
    print(f"measured / predicted ln(ppl ratio): {', '.join(f'{factor:.3f}' for factor in factors)}")


if __name__ == "__main__":
    main()
