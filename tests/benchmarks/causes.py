"""Which share of the cliffs of a profile carries one recorded cause, by kind. The bar: 95 %.

python tests/benchmarks/causes.py nvidia-h100-80gb-hbm3
"""

from collections import defaultdict

import numpy as np

from gac.profiling.table import Profile
from gac_extensions.lab.cliffs import find_cliffs
from gac_extensions.lab.mechanisms import causes_of
from tests.benchmarks.harness import options


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("profile", help="a name that gac profiles lists, or a file")
    profile = Profile.load(parser.parse_args().profile)
    slowdowns = defaultdict(list)
    for sweep in profile.sweeps():
        cliffs = find_cliffs(sweep)
        for cause, slowdown in zip(causes_of(sweep, cliffs, profile.header), cliffs.slowdown, strict=True):
            slowdowns[cause.kind if cause else "(none recorded)"].append(slowdown)
    total = sum(map(len, slowdowns.values()))
    print(f"{total:,} collapsed dims of {profile.header.gpu}")
    for kind, found in sorted(slowdowns.items(), key=lambda item: -len(item[1])):
        print(f"{kind:16} {len(found):6,} {len(found) / total:6.1%}  {np.median(found):.2f}x in the median")


if __name__ == "__main__":
    main()
