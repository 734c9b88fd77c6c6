"""What fewer heads, skipped blocks and pairs in narrower MLPs give: plans with each of them, with none and with all.

    python tests/benchmarks/structures.py --params 0.8 0.7 --latency 0.6 --output structures.json

Every row is a plan, compressed and measured: limited in parameters, or in the latency of both default workloads alone.
Plans alike are measured once. Several targets can be measured at a time, each by a process with a file of its own.
"""

from collections import Counter
from typing import Any

from gac.forms import DEFAULT_FORMS
from gac.plan.plan import Plan, WeightChoice
from gac.plan.recipe import DEFAULT_WORKLOADS
from tests.benchmarks.harness import OF_A_STUDY, Study, options

STRUCTURES = ("heads", "skip", "narrow_pair")
SETS = {"none": (), **{one: (one,) for one in STRUCTURES}, "skip and narrow_pair": STRUCTURES[1:], "all": STRUCTURES}


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY, "--refit")
    parser.add_argument("--params", type=float, nargs="*", default=[])
    parser.add_argument("--latency", type=float, nargs="*", default=[])
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--slack", type=float, help="as the option of gac.allocate")
    parser.set_defaults(calibration="wiki-sample:190x1024")
    asked = parser.parse_args()
    study = Structures(asked, "refit", speed=True)
    for name in asked.sets:
        forms = (*DEFAULT_FORMS, *SETS[name])
        for budget in asked.params:
            labels = {"with": name, "limited": "parameters", "share": budget}
            study.add(labels, budget, forms=forms, refit=asked.refit, slack=asked.slack)
        for share in asked.latency:
            given = {"latency": dict.fromkeys(DEFAULT_WORKLOADS, share)}
            labels = {"with": name, "limited": "latency", "share": share}
            study.add(labels, 1.0, forms=forms, refit=asked.refit, slack=asked.slack, **given)


class Structures(Study):
    """A study that measures plans alike once, and says how often each form was taken."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._known: dict[Any, dict[str, Any]] = {}

    def quality_of(self, plan: Plan) -> dict[str, Any]:
        choices = plan.weights, plan.recipe.refit
        if choices not in self._known:
            self._known[choices] = super().quality_of(plan)
        return self._known[choices]

    def measured(self, plan: Plan) -> dict[str, Any]:
        writing = [one for one in plan.weights if one.weight.to_residual]
        return {
            "taken": Counter(one.form.partition(":")[0] for one in plan.weights),
            "skipped attentions": sum(_is_skipped(one) and one.weight.values == "in" for one in writing),
            "skipped MLPs": sum(_is_skipped(one) and one.weight.neurons == "in" for one in writing),
            "heads dropped": sum(one.weight.groups - one.dim for one in writing if one.form == "heads"),
            "summed": plan.prediction.summed,
        } | super().measured(plan)


def _is_skipped(one: WeightChoice) -> bool:
    return one.form == "skip" and one.dim == 0


if __name__ == "__main__":
    main()
