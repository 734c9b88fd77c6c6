"""Loss on three texts of models that were calibrated on Wikipedia, on what the model writes, on news, and on mixes.

    python tests/benchmarks/texts.py --output texts.json
    python tests/benchmarks/texts.py --size 16 --windows 16 --only wiki --only "half its own" --output few.json

All texts are packaged. Calibration reads their heads, evaluation the rest.
"""

from tests.benchmarks.harness import OF_A_STUDY, Study, options

SHARES = {
    "wiki": {"wiki-sample": 8},
    "three quarters wiki": {"wiki-sample": 6, "self": 2},
    "half its own": {"wiki-sample": 4, "self": 4},
    "its own": {"self": 8},
    "half news": {"wiki-sample": 4, "news-sample": 4},
    "an eighth reference": {"wiki-sample": 7, "python-reference": 1},
}
"""Eighths of the calibration windows that are of each text; ``self`` is written by the dense model."""


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--budgets")
    parser.add_argument("--size", type=int, default=64, help="windows of calibration text, a multiple of 8, 64 at most")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window, of calibration and of evaluation")
    parser.add_argument("--only", choices=tuple(SHARES), action="append", help="repeatable; all by default")
    parser.set_defaults(budgets=[0.8])
    asked = parser.parse_args()
    study = Study(asked, "size", "length")
    for name in asked.only or SHARES:
        windows = {text: asked.size * share // 8 for text, share in SHARES[name].items()}
        calibration = [f"{text}:{count}x{asked.length}" for text, count in windows.items()]
        for budget in asked.budgets:
            study.add({"calibrated on": name}, budget, calibration=calibration)


if __name__ == "__main__":
    main()
