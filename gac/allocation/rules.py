"""The seam of rules: how the choice is made. The exact choice is one; ``weight_rules`` has the base of the others."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from gac.allocation.decide import Decision, decide
from gac.allocation.problem import Problem
from gac.core.arrays import Floats
from gac.core.registry import Registry, check_contract
from gac.models.sites import Site
from gac.plan.recipe import Recipe

if TYPE_CHECKING:
    from gac.measurement.calibration import CalibrationRun


class Rule(ABC):
    """A way to choose; ``gac.testing.check_rule`` checks one of your own.

    Attributes:
        name: as users give it, with its parameter where it has one; certificates of its plans are under it.
        limits_cache: whether it can share out the KV cache, for forms that count it.
    """

    name: str
    limits_cache: ClassVar[bool] = False

    @abstractmethod
    def check(self, recipe: Recipe) -> None:
        """Refuse forms and limits that the rule knows nothing of, before anything is measured.

        Raises:
            GacError: names the form or the limit.
        """

    def measure(self, run: "CalibrationRun", sites: Sequence[Site]) -> Mapping[str, Floats]:
        """What it reads of the model besides loss curves, by weight name: ``problem.measurements``.

        Args:
            run: the model, its calibration windows, the metric that curves are measured in, and where factors are kept.
            sites: all of the model, in its order.
        """
        return {}

    @abstractmethod
    def decide(self, problem: Problem) -> Decision:
        """The plan that it makes, and the exact choice that it is or is set beside.

        Raises:
            BudgetError: the limits of the problem's recipe cannot be met.
        """


class Exact(Rule):
    """The exact choice over the loss curves, of any forms and under any limits."""

    name = "loss"
    limits_cache = True

    def check(self, recipe: Recipe) -> None:
        return None

    def decide(self, problem: Problem) -> Decision:
        return decide(problem)


RULES: Registry[Rule] = Registry(
    "rule",
    {
        "loss": "gac.allocation.rules:Exact",
        "importance": "gac.baselines.rules:Importance",
        "uniform": "gac.baselines.rules:Uniform",
        "fisher": "gac.baselines.rules:Fisher",
        "zero-sum": "gac.baselines.rules:ZeroSum",
        "sensitivity": "gac.baselines.rules:Sensitivity",
    },
    lambda own: check_contract("rule", own, (), Rule),
)
"""Every rule by name; those that give ranks are also rounded, as in ``uniform:down8``."""
