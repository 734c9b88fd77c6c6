"""Which share of the cliffs of a profile carries one recorded cause, by kind. The bar: 95 %.

python tests/benchmarks/causes.py nvidia-h100-80gb-hbm3
"""

import argparse
from collections import Counter

import numpy as np

from gac.lab.mechanisms import causes_of
from gac.profiling.cliffs import find_cliffs
from gac.profiling.table import Profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", help="a name that gac profiles lists, or a file")
    profile = Profile.load(parser.parse_args().profile)
    slowdowns: dict[str, list[float]] = {}
    for sweep in profile.sweeps():
        cliffs = find_cliffs(sweep)
        for cause, slowdown in zip(causes_of(sweep, cliffs, profile.header), cliffs.slowdown, strict=True):
            slowdowns.setdefault(cause.kind if cause else "(none recorded)", []).append(float(slowdown))
    counts = Counter({kind: len(found) for kind, found in slowdowns.items()})
    print(f"{counts.total():,} collapsed dims of {profile.header.gpu}")
    for kind, count in counts.most_common():
        print(f"{kind:16} {count:6,} {count / counts.total():6.1%}  {np.median(slowdowns[kind]):.2f}x in the median")


if __name__ == "__main__":
    main()
