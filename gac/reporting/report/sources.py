"""What a page is made from, checked to belong together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gac.allocation.frontier import Frontier
from gac.errors import PlanError, ProfileError
from gac.plan import Plan, PlanComparison
from gac.profiling.folders import profile_with
from gac.profiling.table import Profile


@dataclass(frozen=True)
class Named:
    """A plan and what the page calls it."""

    name: str
    plan: Plan


@dataclass(frozen=True, eq=False)
class Sources:
    """A plan, and what it is set beside.

    Attributes:
        plan: what the page is about.
        against: other plans for the same model.
        frontier: the least loss for other budgets, where one was made.
        profile: the latency table that the plan names, where it is at hand.

    Raises:
        PlanError: a plan or the frontier is for another model, or the frontier's losses are of another scale.
        ProfileError: the profile is not the one that the plan names.
    """

    plan: Named
    against: tuple[Named, ...] = ()
    frontier: Frontier | None = None
    profile: Profile | None = None

    def __post_init__(self) -> None:
        assert len(self.comparisons) == len(self.against)
        if self.frontier is not None:
            _check_frontier(self.plan.plan, self.frontier)
        digest = self.plan.plan.profile.digest
        if self.profile is not None and self.profile.digest != digest:
            raise ProfileError(
                f"profile {self.profile.path} has digest {self.profile.digest[:12]}",
                f"{digest[:12]}, the one that the plan was made with",
                "Leave it out, or name that one.",
            )

    @cached_property
    def comparisons(self) -> Sequence[PlanComparison]:
        """The plan beside each of the others."""
        return [self.plan.plan.compare(other.plan) for other in self.against]


def profile_of(plan: Plan) -> Profile | None:
    """The shipped or saved profile that a plan names by its digest; None where it is not at hand."""
    path = profile_with(plan.profile.digest)
    return None if path is None else Profile.load(path)


def _check_frontier(plan: Plan, frontier: Frontier) -> None:
    made = frontier.made_from
    if made.model_digest != plan.model_digest:
        raise PlanError(
            f"a plan for {plan.model} ({plan.model_digest[:12]}) beside a frontier for {made.model} "
            f"({made.model_digest[:12]})",
            "a frontier of the same model",
            "Make it for the same weights, or leave it out.",
        )
    ours = plan.method, plan.calibration, plan.prediction.factor
    if ours != (made.method, made.calibration, made.factor):
        raise PlanError(
            f"a plan by {_scale(plan.method, plan.calibration.digest, plan.prediction.factor)} beside a frontier by "
            f"{_scale(made.method, made.calibration.digest, made.factor)}",
            "losses of one scale: the same method, calibration text and refit",
            "Make the frontier as the plan was made, or leave it out.",
        )


def _scale(method: str, digest: str, factor: float) -> str:
    return f"{method} on text {digest[:12]} with factor {factor:g}"
