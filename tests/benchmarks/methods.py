"""Perplexity over dense of every method and of the peers' allocations, as they come and aligned to 8, 16, 32 and 64.

    python tests/benchmarks/methods.py --output tests/benchmarks/results/methods.json

Rows are saved as they come, with a markdown table beside the JSON; the same command goes on where it stopped. Runs on
the GPU where there is one. The statistics of a method are taken once for all of its rows.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from reading import machine, read

import gac
from gac.errors import BudgetError
from gac.io import atomic_path
from gac.models.loading import Loaded
from gac.plan import Plan

table = cache(gac.Profile.load)

METHODS = ("svd", "asvd", "svd-llm", "kfac")
PEERS = (("svd-llm", "uniform"), ("asvd", "sensitivity"), ("svd-llm", "zero-sum"))
STEPS = (8, 16, 32, 64)
COLUMNS = (
    *("method", "rule", "refit", "forms", "budget", "align"),
    *("kept", "used", "over", "cache", "misaligned", "predicted", "ratio"),
)


@dataclass(frozen=True)
class Case:
    """One row to measure.

    Attributes:
        budget: kept fraction of the parameters; of the KV cache for ``palu``.
        align: that of ``gac.allocate``, which a peer's own rounding stands in for.
    """

    method: str
    rule: str
    forms: tuple[str, ...]
    budget: float
    align: bool | int
    refit: str = "none"


def cases(budgets: list[float], cache_budgets: list[float]) -> Iterator[Case]:
    for budget in budgets:
        for method in METHODS:
            yield from exact(method, ("low_rank", "narrow"), budget)
        yield from exact("kfac", ("low_rank", "narrow"), budget, "residual")
        yield Case("svd-llm", "uniform", ("low_rank",), budget, False, "update")
        for method, rule in PEERS:
            yield from rounded(method, rule, ("low_rank",), budget)
    for budget in cache_budgets:
        yield from exact("palu", ("grouped",), budget)
        yield from rounded("palu", "fisher", ("grouped",), budget)


def exact(method: str, forms: tuple[str, ...], budget: float, refit: str = "none") -> Iterator[Case]:
    return (Case(method, "loss", forms, budget, align, refit) for align in (False, *STEPS))


def rounded(method: str, rule: str, forms: tuple[str, ...], budget: float) -> Iterator[Case]:
    roundings = ("", *(f":nearest{step}" for step in STEPS))
    return (Case(method, rule + rounding, forms, budget, False) for rounding in roundings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--calibration", default="wiki-sample:64x1024")
    parser.add_argument("--text", default="wiki-sample", help="what perplexity is measured on")
    parser.add_argument("--length", type=int, default=1024, help="tokens of an evaluation window")
    parser.add_argument("--windows", type=int, help="evaluation windows; all where not given")
    parser.add_argument("--profile", default="nvidia-h100-80gb-hbm3")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.9, 0.8, 0.7, 0.6])
    parser.add_argument("--cache-budgets", type=float, nargs="*", default=[0.7, 0.5], help="of the KV cache, for palu")
    parser.add_argument("--only", default="", help="rows whose method, rule and refit begin with this")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    loaded = read(asked.model)
    result = resumed(asked, loaded)
    done = [
        {key: row[key] for key in ("method", "rule", "forms", "budget", "align", "refit")} for row in result["rows"]
    ]
    for case in cases(asked.budgets, asked.cache_budgets):
        key = json.loads(json.dumps(asdict(case)))
        if key not in done and f"{case.method} {case.rule} {case.refit}".startswith(asked.only):
            result["rows"].append(key | outcome(loaded, case, asked, result["dense"]))
            write(result, asked.output)
            print(line(result["rows"][-1]), flush=True)


def resumed(asked: argparse.Namespace, loaded: Loaded) -> dict[str, Any]:
    """What was measured before under the same settings, or a new result with the dense perplexity."""
    settings = {name: getattr(asked, name) for name in ("model", "calibration", "text", "length", "windows", "profile")}
    settings |= {"dtype": str(loaded.model.dtype), "gac": gac.__version__, "torch": torch.__version__}
    settings["device"] = machine()["device"]
    if asked.output.exists():
        found: dict[str, Any] = json.loads(asked.output.read_text())
        if found["settings"] != settings:
            raise SystemExit(f"{asked.output} was measured with {found['settings']}, not {settings}")
        return found
    dense = perplexity(loaded.model, loaded, asked)
    print(f"dense {dense}")
    return {"settings": settings, "protocol": dense.protocol, "dense": dense.value, "rows": []}


def outcome(loaded: Loaded, case: Case, asked: argparse.Namespace, dense: float) -> dict[str, Any]:
    """The figures of a row, or why there are none: a budget can be out of reach of a step."""
    try:
        return measured(loaded, case, asked, dense)
    except BudgetError as failure:
        return {"refused": str(failure)}


def measured(loaded: Loaded, case: Case, asked: argparse.Namespace, dense: float) -> dict[str, Any]:
    begun = time.monotonic()
    plan = gac.allocate(
        loaded.model,
        case.budget,
        profile=table(asked.profile),
        method=case.method,
        forms=case.forms,
        rule=case.rule,
        align=case.align,
        refit=case.refit,
        calibration=asked.calibration,
        tokenizer=loaded.tokenizer,
    )
    model = gac.compress(copy.deepcopy(loaded.model), plan, tokenizer=loaded.tokenizer)
    found = perplexity(model, loaded, asked)
    return figures(plan) | {
        "perplexity": found.value,
        "ratio": found.value / dense,
        "measured": math.log(found.value / dense),
        "seconds": time.monotonic() - begun,
    }


def perplexity(model: Any, loaded: Loaded, asked: argparse.Namespace) -> Any:
    return gac.perplexity(model, loaded.tokenizer, asked.text, windows=asked.windows, length=asked.length)


def figures(plan: Plan) -> dict[str, Any]:
    return {
        "kept": plan.budget.kept,
        "used": plan.budget.used,
        "over": plan.budget.over,
        "cache": plan.kv_numbers[0] / plan.kv_numbers[1],
        "misaligned": 1 - plan.aligned_fraction,
        "alignment": plan.alignment,
        "predicted": plan.prediction.loss,
    }


def write(result: dict[str, Any], output: Path) -> None:
    """The JSON, and the table with its rows by budget and then by perplexity."""
    with atomic_path(output) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    rows = sorted(result["rows"], key=lambda row: (row["method"] == "palu", -row["budget"], row.get("ratio", math.inf)))
    head = f"Dense perplexity {result['dense']:.3f}: {result['protocol']}; {result['settings']['device']}.\n\n"
    table = [" | ".join(["", *COLUMNS, ""]).strip(), "| --- " * len(COLUMNS) + "|", *map(line, rows)]
    with atomic_path(output.with_suffix(".md")) as temporary:
        temporary.write_text(head + "\n".join(table) + "\n")


def line(row: dict[str, Any]) -> str:
    """A row of the table; ``cache`` is the kept fraction of the KV cache, and what is predicted is ln(ratio)."""
    cells = {name: f"{value:.4f}" if isinstance(value, float) else str(value) for name, value in row.items()}
    ratio = f"{row['ratio']:.4g}" if "ratio" in row else "out of reach"
    cells |= {"forms": ", ".join(row["forms"]), "ratio": ratio, "budget": f"{row['budget']:g}"}
    return f"| {' | '.join(cells.get(name, '') for name in COLUMNS)} |"


if __name__ == "__main__":
    main()
