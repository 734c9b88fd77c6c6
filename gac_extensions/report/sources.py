"""The plans, frontier and profile of a page, checked to belong together."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gac.allocation.frontier import Frontier
from gac.core.errors import PlanError, ProfileError
from gac.plan.plan import Plan, PlanComparison
from gac.profiling.folders import profile_with
from gac.profiling.table import Profile
from gac.reporting.frontier import check_comparable
from gac_extensions.report.measured import MeasuredText

logger = logging.getLogger("gac")


@dataclass(frozen=True, eq=False)
class Sources:
    """The plan of a page, and what stands beside it; errors as for ``gac.report``."""

    plan: Plan
    name: str = "plan"  # of the plan, on the page
    against: Mapping[str, Plan] = field(default_factory=dict)  # other plans for the same model, by name
    frontier: Frontier | None = None  # the least loss for other budgets, where one was made
    profile: Profile | None = None  # the latency table that the plan names, where it is at hand
    tokens: Mapping[str, Any] | None = None  # the section about a plan of tokens for the same model
    measured: tuple[MeasuredText, ...] = ()  # perplexities of the plan's model, where they were measured

    def __post_init__(self) -> None:
        if not self.plan.measured.predicted:
            raise PlanError(
                f"plan {self.name}, which states what others pruned",
                "a plan that weighed its choices, from gac allocate",
                "Read its summary: gac.Plan.load(path).summary().",
            )
        _ = self.comparisons  # refuses plans for other models
        if self.frontier is not None:
            check_comparable(self.frontier, self.plan, self.name)
            ours, theirs = (record.recipe.measure.method for record in (self.plan, self.frontier))
            if ours != theirs:
                problem = f"plan {self.name} by {ours} beside a frontier by {theirs}"
                remedy = "Make the frontier as the plan was made, or leave it out."
                raise PlanError(problem, "losses of one scale: the same method", remedy)
        digest = self.plan.measured.profile.digest
        if self.profile is not None and self.profile.digest != digest:
            problem = f"profile {self.profile.path} has digest {self.profile.digest[:12]}"
            expected = f"{digest[:12]}, the one that the plan was made with"
            raise ProfileError(problem, expected, "Leave it out, or name that one.")

    @cached_property
    def comparisons(self) -> dict[str, PlanComparison]:
        return {name: self.plan.compare(other) for name, other in self.against.items()}

    @property
    def healed(self) -> bool:
        """True if the model was healed, which no prediction counts: the measured one, or the plan's own."""
        return bool(self.plan.healed) or any(text.healed for text in self.measured)

    @property
    def recipe_differences(self) -> tuple[str, ...]:
        """The settings in which the frontier differs from the plan: ``refit residual instead of none``."""
        if self.frontier is None:
            return ()
        theirs, ours = _settings(self.frontier), _settings(self.plan)
        return tuple(
            f"{name} {theirs[name]} instead of {value}" for name, value in ours.items() if theirs[name] != value
        )


def _settings(record: Plan | Frontier) -> dict[str, object]:
    recipe = record.recipe
    return {
        "refit": recipe.refit,
        "shots": recipe.measure.shots,
        "forms": "+".join(recipe.space.forms),
        "align": recipe.space.align,
        "fuse": recipe.deployment.fuse,
        "profile": record.measured.profile.digest[:12],
    }


def profile_of(plan: Plan) -> Profile | None:
    """The shipped or saved profile that a plan names by its digest; None, and a line in the log, if there is none."""
    digest = plan.measured.profile.digest
    if (path := profile_with(digest)) is not None:
        return Profile.load(path)
    missing = "the latency table %s is not at hand: the page will not say what the next dims would take"
    logger.info(missing, digest[:12])
    return None
