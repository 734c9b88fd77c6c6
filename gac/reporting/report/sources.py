"""The plans, frontier and profile of a page, checked to belong together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gac.allocation.frontier import Frontier
from gac.errors import PlanError, ProfileError
from gac.plan import Plan, PlanComparison
from gac.profiling.folders import profile_with
from gac.profiling.table import Profile
from gac.recipe import Recipe


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
        _ = self.comparisons  # refuses plans for other models
        if self.frontier is not None:
            _check_frontier(self.plan.plan, self.frontier)
        digest = self.plan.plan.measured.profile.digest
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

    @property
    def unlike(self) -> tuple[str, ...]:
        """What the frontier was made with otherwise than the plan: ``refit residual instead of none``."""
        if self.frontier is None:
            return ()
        ours, theirs = self.plan.plan, self.frontier
        told, asked = _told(theirs.recipe), _told(ours.recipe)
        found = {name: (told[name], asked[name]) for name in asked}
        found["profile"] = theirs.measured.profile.digest[:12], ours.measured.profile.digest[:12]
        return tuple(f"{name} {made} instead of {plan}" for name, (made, plan) in found.items() if made != plan)


def _told(recipe: Recipe) -> dict[str, object]:
    """What a frontier may have been made with otherwise."""
    return {
        "refit": recipe.refit,
        "shots": recipe.measure.shots,
        "forms": "+".join(recipe.space.forms),
        "align": recipe.space.align,
        "fuse": recipe.deployment.fuse,
        "decode kernel": recipe.deployment.decode_kernel,
    }


def profile_of(plan: Plan) -> Profile | None:
    """The shipped or saved profile that a plan names by its digest; None where it is not at hand."""
    path = profile_with(plan.measured.profile.digest)
    return None if path is None else Profile.load(path)


def _check_frontier(plan: Plan, frontier: Frontier) -> None:
    made, ours = frontier.measured, plan.measured
    if made.digest != ours.digest:
        raise PlanError(
            f"a plan for {ours.model} ({ours.digest[:12]}) beside a frontier for {made.model} ({made.digest[:12]})",
            "a frontier of the same model",
            "Make it for the same weights, or leave it out.",
        )
    methods = [one.recipe.measure.method for one in (plan, frontier)]
    if methods[0] != methods[1] or ours.calibration != made.calibration:
        raise PlanError(
            f"a plan by {methods[0]} on text {ours.calibration.digest[:12]} beside a frontier by {methods[1]} "
            f"on text {made.calibration.digest[:12]}",
            "losses of one scale: the same method and calibration text",
            "Make the frontier as the plan was made, or leave it out.",
        )
