"""Kernels for weights of each scheme beside each other: which one is fastest for how many rows.

    python tests/benchmarks/scheme_kernels.py --seconds 150 --warm 12 --output scheme-kernels.json

Each case is a scheme, a shape, a number of rows and something that can multiply so (``kernels/candidates.py``). Medians
as ``gac profile`` takes them: CUDA graphs, every launch on other buffers, L2 flushed. Beside them stand the time of
``F.linear`` in bf16 in the same run, the error against float32 with the same rounded weights (and inputs, where the
scheme rounds them), and the bytes that must be read and written, as the share of the time that they would take at the
bandwidth of a copy. What fails has the first line of why instead.

Cases are written one by one, the first shapes first, and the same command goes on where time was up. ``--warm`` first
compiles kernels in so many processes, for half of the time at most.
"""

from collections.abc import Sequence
from typing import Any

from tests.benchmarks.kernels.candidates import CANDIDATES

from tests.benchmarks.harness import markdown, options
from tests.benchmarks.kernels.running import ASKED, Best, best, run

SCHEMES = ("bf16", "w8a16", "w4a16", "w4a16:64", "w3a16", "w2a16", "w8a8", "fp8")
ROWS = (1, 16, 64, 1024, 4096)
SHAPES = (
    "4096x4096", "4096x14336", "14336x4096", "4096x1024", "4096x2048", "2048x4096", "576x576", "576x1536", "1536x576",
)  # fmt: skip
ONE_ROW_SHARE = 0.65
FP8_GAIN = 1.4


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """The fastest of each scheme, shape and number of rows, of those that do all of the work; and the bars."""
    found = best(rows)
    heights = sorted({row["m"] for row in rows})
    parts = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        shapes = dict.fromkeys((row["k"], row["n"]) for row in rows if row["scheme"] == scheme)
        lines = [[f"{k}x{n}", *(_cell(found.get((scheme, k, n, m))) for m in heights)] for k, n in shapes]
        parts.append(f"{scheme}\n\n" + markdown(["k x n", *(f"m = {m}" for m in heights)], lines))
    return "\n".join([*parts, *_bars(found)])


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['candidate']}: {row['us']:.1f} us, {row['ratio']:.2f}x, {100 * row['share']:.0f} %"


def _bars(found: Best) -> list[str]:
    """Whether the fastest reach what is wanted of them."""
    weights = [row for row in found.values() if row["m"] == 1 and row["scheme"].split(":")[0].endswith("a16")]
    fp8 = [
        row for row in found.values() if (row["scheme"], row["m"]) == ("fp8", 1024) and row["k"] * row["n"] > 4096**2
    ]
    return [
        _bar(
            f"weights alone at one row, share of bandwidth, at least {ONE_ROW_SHARE}", weights, "share", ONE_ROW_SHARE
        ),
        _bar(f"fp8 at 1024 rows above 4096x4096, times bf16, at least {FP8_GAIN}", fp8, "ratio", FP8_GAIN),
    ]


def _bar(told: str, rows: Sequence[dict[str, Any]], key: str, least: float) -> str:
    under = [f"{row['scheme']} {row['k']}x{row['n']} {row[key]:.2f}" for row in rows if row[key] < least]
    return f"{told}: {len(rows) - len(under)} of {len(rows)}" + (f"; not {', '.join(under)}" if under else "")


def main() -> None:
    parser = options(__doc__, *ASKED)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="k x n, as 4096x1024")
    parser.add_argument("--candidates", nargs="+", help="names or packages: torch, gac, gemlite, humming")
    asked = parser.parse_args()
    wanted = asked.candidates or CANDIDATES
    print(tables(run(asked, {name: one for name, one in CANDIDATES.items() if {name, one.package} & set(wanted)})))


if __name__ == "__main__":
    main()
