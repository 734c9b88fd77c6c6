"""How far the medians of two tables of the same shapes are apart: of one GPU's, and of several GPUs' that shared them.

    python tests/benchmarks/two_tables.py one.jsonl two.jsonl --seconds 85 45

The first is what the second is held against. ``--seconds`` are those that each took, if their ratio is wanted.
"""

import numpy as np

from gac.profiling.records import Point
from gac.profiling.table import Profile
from tests.benchmarks.harness import options

NEAR = 0.02


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("tables", nargs=2, metavar="TABLE")
    parser.add_argument("--seconds", nargs=2, type=float)
    asked = parser.parse_args()
    one, other = (medians(path) for path in asked.tables)
    common = [point for point in one if point in other]
    apart = np.abs(np.array([other[point] / one[point] - 1 for point in common]))
    print(f"{len(common):,} shapes in both, of {len(one):,} and {len(other):,}")
    print(f"{(apart <= NEAR).mean():.1%} within {NEAR:.0%}; {np.median(apart):.2%} apart in the median, ", end="")
    print(f"{np.quantile(apart, 0.95):.1%} for 95 %, {apart.max():.1%} at most")
    if asked.seconds:
        first, second = asked.seconds
        print(f"{first / second:.2f} times as fast")


def medians(path: str) -> dict[Point, float]:
    """Of every shape that has one."""
    return {row.point: row.median_ns for row in Profile.load(path).measurements if row.median_ns is not None}


if __name__ == "__main__":
    main()
