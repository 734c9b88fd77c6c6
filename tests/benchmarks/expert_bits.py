"""Routed experts in few bits, beside the dense model that they were made from in as many.

    python tests/benchmarks/expert_bits.py upcycled-smollm2 --output expert-bits.json

The model is a directory of ``tests/benchmarks/upcycle.py``. Excess ln(perplexity) on each text over the same model in
16 bits: of the mixture and of SmolLM2, each with all of its linear weights in a scheme; routers stay as they are.
SmolLM2 is rotated, because the packaged one lies on a 4-bit grid. All experts stay.
"""

import argparse
import math
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import gac
from gac.measurement.samples import SAMPLE_TEXTS
from gac.models.loading import Loaded, load_model
from gac.plan.recipe import DEFAULT_TEXT
from tests.benchmarks.harness import markdown, write

SCHEMES = ("w4a16:64", "fp8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dense", default="smollm2")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--calibration", nargs="+", default=list(DEFAULT_TEXT))
    parser.add_argument("--texts", nargs="+", default=list(SAMPLE_TEXTS))
    parser.add_argument("--windows", type=int, help="of evaluation; all where not given")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, forms, rotate in ((asked.model, ["experts"], False), (asked.dense, [], True)):
        loaded = load_model(name)
        dense = perplexities(loaded.model, loaded, asked.texts, asked.windows)
        for scheme in asked.schemes:
            plan = gac.allocate(
                loaded.model,
                1.0,
                forms=forms,
                schemes=[scheme],
                calibration=asked.calibration,
                tokenizer=loaded.tokenizer,
                latency="any",
                rotate=rotate,
            )
            assert all(choice.scheme == scheme for choice in plan.weights if not choice.name.endswith("gate"))
            model = gac.compress(deepcopy(loaded.model), plan, tokenizer=loaded.tokenizer, heal=0)
            after = perplexities(model, loaded, asked.texts, asked.windows)
            excess = {text: math.log(value / dense[text]) for text, value in after.items()}
            row = {"model": Path(name).name, "scheme": scheme, "bytes": plan.bytes[0]}
            rows.append(row | {"predicted": plan.prediction.loss} | excess)
            print(rows[-1], flush=True)
    cells = [[row["model"], row["scheme"], *figures(row, asked.texts)] for row in rows]
    print(markdown(["model", "scheme", *asked.texts, "mean"], cells))
    write(asked.output, rows=rows)


def figures(row: dict[str, Any], texts: Sequence[str]) -> list[str]:
    of_texts = [row[text] for text in texts]
    return [f"{value:.4f}" for value in (*of_texts, fmean(of_texts))]


def perplexities(model: Any, loaded: Loaded, texts: Sequence[str], windows: int | None) -> dict[str, float]:
    of = partial(gac.perplexity, model, loaded.tokenizer, windows=windows, progress=False)
    return {text: of(text).value for text in texts}


if __name__ == "__main__":
    main()
