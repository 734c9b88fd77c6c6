"""Loss on three texts of models that were calibrated on each of three: Wikipedia, technical text, and half of each.

    python tests/benchmarks/texts.py --output tests/benchmarks/results/texts.json

Technical text is docstrings: PyTorch's and SciPy's to calibrate on, NumPy's and Python's own to evaluate on. Prose is
the news in the package gensim, which no calibration sees. All three calibrations have as many windows.
"""

import ast
import importlib.util
import math
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gac
from tests.benchmarks.harness import OF_A_STUDY, Study, options

PAGES = 120
"""Files of docstrings of each package, those with most of them."""


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets")
    parser.add_argument("--size", type=int, default=96, help="windows of calibration text")
    parser.set_defaults(budgets=[0.8], windows=64)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        learned = written(Path(folder, "technical.txt"), "torch", "scipy")
        texts = {
            "wiki": "wiki-sample",
            "prose": str(inside("gensim") / "test" / "test_data" / "lee_background.cor"),
            "technical": written(Path(folder, "other-technical.txt"), "numpy", ""),
        }
        whole, half = asked.size, asked.size // 2
        calibrations = {
            "wiki": [f"wiki-sample:{whole}x1024"],
            "half of each": [f"wiki-sample:{half}x1024", f"{learned}:{half}x1024"],
            "technical": [f"{learned}:{whole}x1024"],
        }
        study = OnTexts(asked, texts)
        for name, calibration in calibrations.items():
            for budget in asked.budgets:
                study.add({"calibrated on": name}, budget, calibration=calibration)


class OnTexts(Study):
    """A study whose rows have ln(ppl / dense) on several texts."""

    def __init__(self, asked: object, texts: dict[str, str]) -> None:
        self._texts = texts
        super().__init__(asked, "size")  # type: ignore[arg-type]
        self._dense = self._losses(self.loaded.model)
        print("dense", self._dense)

    def _perplexity(self, model: object) -> gac.Perplexity:
        found = super()._perplexity(model)
        self._last = self._losses(model) if hasattr(self, "_dense") else {}
        return found

    def measured(self, plan: gac.Plan) -> dict[str, object]:
        found = super().measured(plan)
        return found | {name: loss - self._dense[name] for name, loss in self._last.items()}

    def _losses(self, model: object) -> dict[str, float]:
        windows = self._asked.windows
        found = {
            name: gac.perplexity(model, self.loaded.tokenizer, text, windows=windows)  # type: ignore[arg-type]
            for name, text in self._texts.items()
        }
        return {name: math.log(perplexity.value) for name, perplexity in found.items()}


def inside(package: str) -> Path:
    """The folder of an installed package, or of Python's own library."""
    if not package:
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    return Path(next(iter(spec.submodule_search_locations or ())))


def written(path: Path, *packages: str) -> str:
    """A file with the docstrings of packages, file after file."""
    path.write_text("\n\n".join(text for package in packages for text in docstrings(inside(package))), encoding="utf-8")
    return str(path)


def docstrings(folder: Path) -> Iterator[str]:
    files = sorted(folder.glob("*.py" if folder == inside("") else "**/*.py"))
    found = ["\n\n".join(of_file(path)) for path in files]
    largest = sorted(found, key=len, reverse=True)[:PAGES]
    yield from (text for text in found if text in largest)


def of_file(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text


if __name__ == "__main__":
    main()
