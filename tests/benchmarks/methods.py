"""Perplexity over dense of every method and of the peers' allocations, as they come and aligned to 8, 16, 32 and 64.

    python tests/benchmarks/methods.py --output tests/benchmarks/results/methods.json

Rows are saved as they come, with a markdown table beside the JSON; the same command goes on where it stopped. Runs on
the GPU where there is one. The statistics of a method are taken once for all of its rows.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from gac.core.io import atomic_path
from gac.plan.recipe import DEFAULT_TEXT
from tests.benchmarks.harness import OF_A_STUDY, Study, markdown, options

Case = dict[str, Any]
METHODS = ("svd", "asvd", "svd-llm", "kfac")
PEERS = (("svd-llm", "uniform"), ("asvd", "sensitivity"), ("svd-llm", "zero-sum"))
STEPS = (8, 16, 32, 64)
COLUMNS = (
    *("method", "rule", "refit", "forms", "budget", "align"),
    *("kept", "used", "over", "cache", "misaligned", "predicted", "ratio", "mean_ratio"),
)


def cases(budgets: list[float], cache_budgets: list[float]) -> Iterator[Case]:
    for budget in budgets:
        for method in METHODS:
            yield from exact(method, ("low_rank", "narrow"), budget)
        yield from exact("kfac", ("low_rank", "narrow"), budget, "residual")
        yield case("svd-llm", "uniform", ("low_rank",), budget, False, "update")
        for method, rule in PEERS:
            yield from rounded(method, rule, ("low_rank",), budget)
    for budget in cache_budgets:
        yield from exact("palu", ("latent",), budget)
        yield from rounded("palu", "fisher", ("latent",), budget)


def case(
    method: str, rule: str, forms: tuple[str, ...], budget: float, align: bool | int = False, refit: str = "none"
) -> Case:
    """One row to measure; the budget is of the KV cache for ``palu``, and a peer's own rounding stands in for align."""
    return {"method": method, "rule": rule, "forms": forms, "budget": budget, "align": align, "refit": refit}


def exact(method: str, forms: tuple[str, ...], budget: float, refit: str = "none") -> Iterator[Case]:
    return (case(method, "loss", forms, budget, align, refit) for align in (False, *STEPS))


def rounded(method: str, rule: str, forms: tuple[str, ...], budget: float) -> Iterator[Case]:
    roundings = ("", *(f":nearest{step}" for step in STEPS))
    return (case(method, rule + rounding, forms, budget) for rounding in roundings)


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets")
    parser.add_argument("--length", type=int, default=1024, help="tokens of an evaluation window")
    parser.add_argument("--cache-budgets", type=float, nargs="*", default=[0.7, 0.5], help="of the KV cache, for palu")
    parser.add_argument("--only", default="", help="rows whose method, rule and refit begin with this")
    parser.set_defaults(calibration=[*DEFAULT_TEXT])
    asked = parser.parse_args()
    study = Study(asked, "length")
    for one in cases(asked.budgets, asked.cache_budgets):
        if "{method} {rule} {refit}".format(**one).startswith(asked.only) and study.add({}, **one):
            order = sorted(study.rows, key=lambda row: (row["method"] == "palu", -row["budget"], row.get("ratio", inf)))
            protocols = zip(study.record["denses"].values(), study.record["protocols"], strict=True)
            dense = "; ".join(f"{value:.3f}: {protocol}" for value, protocol in protocols)
            head = f"Dense perplexity {dense}; {study.settings['device']}."
            with atomic_path(asked.output.with_suffix(".md")) as temporary:
                columns = (*COLUMNS, *(f"ln {text}" for text in study.texts))
                temporary.write_text(f"{head}\n\n{markdown(columns, (cells(row, study.texts) for row in order))}")


def cells(row: dict[str, Any], texts: Sequence[str]) -> list[str]:
    """A row of the table; ``cache`` is the kept fraction of the KV cache, and what is predicted is ln(ratio).

    The last columns are ln(ratio) on each text.
    """
    shown = {name: f"{value:.4f}" if isinstance(value, float) else str(value) for name, value in row.items()}
    shown |= {name: f"{row[name]:.4g}" if name in row else "out of reach" for name in ("ratio", "mean_ratio")}
    shown |= {"forms": ", ".join(row["forms"]), "budget": f"{row['budget']:g}"}
    losses = row.get("losses", {})
    on_texts = [f"{losses[text]:.4f}" if text in losses else "" for text in texts]
    return [*(shown.get(name, "") for name in COLUMNS), *on_texts]


if __name__ == "__main__":
    main()
