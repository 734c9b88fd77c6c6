"""Perplexity at a number of bits a weight: form, dim and scheme chosen together, and each of them alone.

    python tests/benchmarks/rotated.py smollm2 rotated-smollm2
    python tests/benchmarks/precision.py --model rotated-smollm2 --output precision.json

Every row is a plan of least loss in so many bytes, compressed and measured. ``bits`` chooses schemes of dense weights,
``ranks`` and ``widths`` choose low-rank pairs and shorter weights in 16 bits, ``joint`` has all of them. With
``--whole`` there is a row for each scheme that is named, which all weights are in. Several rows can be measured at a
time, each by a process with a file of its own.
"""

from collections import Counter
from typing import Any

from gac.forms import DEFAULT_FORMS
from gac.plan.plan import Plan
from tests.benchmarks.harness import OF_A_STUDY, Study, options

BITS = (12.8, 8.4, 6.0, 4.3125, 3.8, 3.3, 2.8)
SCHEMES = ("bf16", "w8a16", "w4a16:64", "w3a16:64", "w2a16:64")
SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "joint": {"forms": (*DEFAULT_FORMS, "head_dim"), "schemes": SCHEMES},
    "bits": {"forms": (), "schemes": SCHEMES},
    "ranks": {"forms": ("low_rank",), "schemes": ("bf16",)},
    "widths": {"forms": ("narrow", "head_dim"), "schemes": ("bf16",)},
}


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--refit")
    parser.add_argument("--bits", type=float, nargs="*", default=BITS)
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--whole", nargs="*", default=(), help="schemes that all weights are in, one after the other")
    parser.add_argument("--rotate", action="store_true", help="as the option of gac.allocate")
    parser.set_defaults(calibration="wiki-sample:190x1024")
    asked = parser.parse_args()
    study = Precision(asked, "refit", "rotate")
    for bits in asked.bits:
        for name in asked.sets:
            given = {"memory": bits / 16, **SETS[name]}
            study.add({"with": name, "bits": bits}, 1.0, refit=asked.refit, rotate=asked.rotate, **given)
    for scheme in asked.whole:
        study.add({"with": scheme}, 1.0, refit=asked.refit, rotate=asked.rotate, forms=(), schemes=(scheme,))


class Precision(Study):
    """A study that says how often each scheme and form was taken."""

    def measured(self, plan: Plan) -> dict[str, Any]:
        return {
            "bytes": plan.bytes[0],
            "schemes": Counter(one.scheme for one in plan.weights),
            "taken": Counter(one.form.partition(":")[0] for one in plan.weights),
        } | super().measured(plan)


if __name__ == "__main__":
    main()
