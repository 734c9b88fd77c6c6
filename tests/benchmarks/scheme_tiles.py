"""Sizes of GAC's kernels for weights of each scheme beside each other: which tile is fastest for how many rows.

    python tests/benchmarks/scheme_tiles.py --seconds 150 --warm 12 --output scheme-tiles.json

Each case is a scheme, a shape, a number of rows and a size (``kernels/tiles.py``), measured as ``scheme_kernels.py``
measures. A size is told by its fields: ``16-128-128-4-4-2`` has 16 rows, 128 outputs and 128 numbers, 4 warps, 4
stages, and 2 programs for each SM where several share a tile. A table shows what is fastest over all shapes, by the
geometric mean, and what is fastest for each. ``gac/runtime/kernels`` has the winners.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from tests.benchmarks.harness import markdown, options
from tests.benchmarks.kernels.running import ASKED, best, run, sound
from tests.benchmarks.kernels.tiles import TILES

SCHEMES = ("w8a16", "w4a16", "w4a16:64", "w3a16", "w2a16", "w8a8", "fp8")
ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 1024, 4096)
SHAPES = ("4096x14336", "14336x4096", "4096x4096")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The fastest for each scheme and number of rows: over all shapes, and for each of them."""
    found, means = best(rows), _means(rows)
    shapes = sorted({(row["k"], row["n"]) for row in rows})
    lines = [
        [scheme, str(m), _over_all(means[scheme, m]), *(_cell(found.get((scheme, *shape, m))) for shape in shapes)]
        for scheme, m in sorted(means)
    ]
    return markdown(["scheme", "rows", "over all shapes", *(f"{k}x{n}" for k, n in shapes)], lines)


def _means(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, float]]:
    """How many times as fast as bf16 each is over the shapes, of those that ran in all; by scheme and rows."""
    ratios: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in filter(sound, rows):
        ratios[row["scheme"], row["m"]][row["candidate"]].append(row["ratio"])
    return {
        at: {name: geometric_mean(of) for name, of in some.items() if len(of) == max(map(len, some.values()))}
        for at, some in ratios.items()
    }


def _over_all(means: dict[str, float]) -> str:
    name = max(means, key=lambda one: means[one])
    return f"{name}: {means[name]:.2f}x"


def _cell(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['candidate']}: {row['us']:.1f} us, {row['ratio']:.2f}x"


def main() -> None:
    parser = options(__doc__, *ASKED)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="k x n, as 4096x1024")
    asked = parser.parse_args()
    print(table(run(asked, TILES)))


if __name__ == "__main__":
    main()
