"""Loss on three texts of models that were calibrated on each of three: Wikipedia, technical text, and half of each.

    python tests/benchmarks/texts.py --learned pages.txt --technical git.txt --output texts.json

Technical text is whatever two files hold, of which one is calibrated on and the other evaluated. The results are of
manual pages as ``man -P cat PAGE | col -bx`` gives them, each page's first 12,000 characters in ``pages.txt`` (none of
Git's) and 20 long pages of Git's in ``git.txt``. Prose is the news in the package gensim, which no calibration sees.
"""

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

import gac
from tests.benchmarks.harness import OF_A_STUDY, Study, options

NEWS = "test/test_data/lee_background.cor"


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets")
    parser.add_argument("--learned", required=True, help="technical text that is calibrated on")
    parser.add_argument("--technical", required=True, help="other technical text, that is evaluated")
    parser.add_argument("--size", type=int, default=64, help="windows of calibration text")
    parser.set_defaults(budgets=[0.8], windows=64)
    asked = parser.parse_args()
    gensim = importlib.util.find_spec("gensim")
    assert gensim is not None, "gensim is not installed"
    news = Path(next(iter(gensim.submodule_search_locations or ())), NEWS)
    study = OnTexts(asked, {"wiki": "wiki-sample", "prose": str(news), "technical": asked.technical})
    whole, half, quarter = asked.size, asked.size // 2, asked.size // 4
    for name, calibration in {
        "wiki": [f"wiki-sample:{whole}x1024"],
        "half of each": [f"wiki-sample:{half}x1024", f"{asked.learned}:{half}x1024"],
        "three to one": [f"wiki-sample:{whole - quarter}x1024", f"{asked.learned}:{quarter}x1024"],
        "technical": [f"{asked.learned}:{whole}x1024"],
        "as much of each": [f"wiki-sample:{whole}x1024", f"{asked.learned}:{whole}x1024"],
    }.items():
        for budget in asked.budgets:
            study.add({"calibrated on": name}, budget, calibration=calibration)


class OnTexts(Study):
    """A study whose rows have ln(ppl / dense) on several texts."""

    def __init__(self, asked: argparse.Namespace, texts: dict[str, str]) -> None:
        self._texts, self._dense = texts, dict.fromkeys(texts, 0.0)
        super().__init__(asked, "size")
        self._dense = self._losses(self.loaded.model)
        print("dense", self._dense)

    def _perplexity(self, model: Any) -> gac.Perplexity:
        self._last = self._losses(model)
        return super()._perplexity(model)

    def measured(self, plan: gac.Plan) -> dict[str, Any]:
        return super().measured(plan) | self._last

    def _losses(self, model: Any) -> dict[str, float]:
        """ln(ppl / dense) on each text."""
        given = self.loaded.tokenizer, self._asked.windows
        found = {name: gac.perplexity(model, given[0], text, windows=given[1]) for name, text in self._texts.items()}
        return {name: math.log(perplexity.value) - self._dense[name] for name, perplexity in found.items()}


if __name__ == "__main__":
    main()
