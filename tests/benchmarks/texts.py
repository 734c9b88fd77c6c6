"""Loss on three texts of models that were calibrated on Wikipedia, on technical text, on what the model writes itself.

    python tests/benchmarks/texts.py --learned pages.txt --technical git.txt --output texts.json

Technical text is whatever two files hold, of which one is calibrated on and the other evaluated. The results are of
manual pages as ``man -P cat PAGE | col -bx`` gives them, each page's first 12,000 characters in ``pages.txt`` (none of
Git's) and 20 long pages of Git's in ``git.txt``. Prose is the news in the package gensim, which no calibration sees.
"""

import argparse
import math
from typing import Any

import gac
from tests.benchmarks.harness import OF_A_STUDY, Study, news, options

SHARES = {
    "wiki": (8, 0, 0),
    "half of each": (4, 4, 0),
    "three to one": (6, 2, 0),
    "seven to one": (7, 1, 0),
    "technical": (0, 8, 0),
    "as much of each": (8, 8, 0),
    "half its own": (4, 0, 4),
    "a quarter its own": (6, 0, 2),
    "its own": (0, 0, 8),
}
"""Eighths of the windows that are of Wikipedia, of technical text, and of text that the dense model writes."""


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets")
    parser.add_argument("--learned", required=True, help="technical text that is calibrated on")
    parser.add_argument("--technical", required=True, help="other technical text, that is evaluated")
    parser.add_argument("--size", type=int, default=64, help="windows of calibration text")
    parser.add_argument("--only", choices=tuple(SHARES), action="append", help="repeatable; all by default")
    parser.set_defaults(budgets=[0.8], windows=64)
    asked = parser.parse_args()
    study = OnTexts(asked, {"wiki": "wiki-sample", "prose": str(news()), "technical": asked.technical})
    for name in asked.only or SHARES:
        sizes = dict(zip(("wiki-sample", asked.learned, "self"), SHARES[name], strict=True))
        calibration = [f"{text}:{asked.size * share // 8}x1024" for text, share in sizes.items() if share]
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
