"""A rule: the deeper a layer, the less of it is kept, in a straight line from the first layer to the last.

Late layers of language models can lose more than early ones (ShortGPT, arXiv 2403.03853; LLM-Pruner keeps the first
layers whole, arXiv 2305.11627). Every weight of a layer keeps the same fraction of its parameters.
"""

from collections.abc import Mapping, Sequence

from gac.allocation.problem import Problem
from gac.allocation.weight_rules import RankRule
from gac.forms import Form
from gac.models.sites import Weight


class Tapered(RankRule):
    """Kept fractions fall by ``slope`` from the first layer to the last; their mean over parameters is the budget."""

    name = "tapered"

    def __init__(self, slope: float = 0.4) -> None:
        self.slope = slope

    def ranks(
        self, problem: Problem, weights: Sequence[Weight], form: Form, fraction: float, limit: int
    ) -> Mapping[str, int]:
        layer = {weight.name: site.layer for site in problem.sites for weight in site.weights}
        deepest = max(layer.values())
        total = sum(weight.params for weight in weights)
        depth = {weight.name: layer[weight.name] / deepest if deepest else 0.0 for weight in weights}
        middle = sum(depth[weight.name] * weight.params for weight in weights) / total
        slope = min(self.slope, 2 * (1 - fraction))  # at the whole budget nothing is taken from any layer
        return {
            weight.name: int(
                (fraction + slope * (middle - depth[weight.name])) * weight.params / form.params(weight, 1)
            )
            for weight in weights
        }
