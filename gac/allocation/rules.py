"""The seam of rules: ways to decide. The exact choice is one; ``weight_rules`` has the base of the others."""

from abc import ABC, abstractmethod
from typing import ClassVar

from gac.allocation.decide import Decision, decide
from gac.allocation.problem import Problem
from gac.core.registry import Registry, check_contract
from gac.plan.recipe import Recipe


class Rule(ABC):
    """A way to decide; ``gac.testing.check_rule`` checks an implementation.

    Attributes:
        name: as users give it, with its parameter where it has one; the ``method`` of its plans' certificates.
        limits_cache: True if it can share out the KV cache, for forms that count it.
        needs: a measurement of weights besides loss curves, a name of ``gac.measurement.weight_measurements``; its
            values are ``problem.measurements``.
    """

    name: str
    limits_cache: ClassVar[bool] = False
    needs: ClassVar[str | None] = None

    def check(self, recipe: Recipe) -> None:  # noqa: B027  # a rule of any forms and limits refuses nothing
        """Refuse forms and limits that the rule does not support, before anything is measured.

        Raises:
            GacError: names the form or the limit.
        """

    @abstractmethod
    def decide(self, problem: Problem) -> Decision:
        """Return its plan, and the exact choice that made or bounds it.

        Raises:
            BudgetError: the limits of the problem's recipe cannot be met.
        """


class Exact(Rule):
    """The exact choice over the loss curves, of any forms and under any limits."""

    name = "loss"
    limits_cache = True
    decide = staticmethod(decide)


RULES: Registry[Rule] = Registry(
    "rule",
    {
        "loss": "gac.allocation.rules:Exact",
        "importance": "gac_extensions.baselines.rules:Importance",
        "uniform": "gac_extensions.baselines.rules:Uniform",
        "fisher": "gac_extensions.baselines.rules:Fisher",
        "zero-sum": "gac_extensions.baselines.rules:ZeroSum",
        "sensitivity": "gac_extensions.baselines.rules:Sensitivity",
    },
    lambda rule: check_contract("rule", rule, (), Rule),
    group="gac.rules",
)
"""Every rule by name; those that give ranks also round them, as in ``uniform:down8``. Packages add theirs by entry
points of the group ``gac.rules``."""
