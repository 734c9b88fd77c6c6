"""A recipe with every default decided, for one model and one latency table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gac.models.families import Family
from gac.models.sites import Site
from gac.plan.evidence import ProfileUsed
from gac.plan.recipe import Recipe

if TYPE_CHECKING:
    from gac.forms.curvature.methods import Method


@dataclass(frozen=True, eq=False)
class ResolvedRecipe:
    """The recipe that ``gac.allocation.resolve.resolve`` completes; every later step takes this record.

    Attributes:
        recipe: with forms, fuse, refit, slack and limits of latency decided. ``space.rotate`` may be None until the
            model is loaded, see ``with_rotation``; a limit that is None limits nothing.
        targeted: the sites of the family, in model order: all weights that may change.
        sites: the same weights as the plan decides on them, see ``gac.forms.planned_sites.as_planned``.
        profile: the latency table's name and digest.
    """

    recipe: Recipe
    method: "Method"
    model_type: str
    family: Family
    targeted: Sequence[Site]
    sites: Sequence[Site]
    profile: ProfileUsed

    @property
    def weight_names(self) -> list[str]:
        """Names of all targeted weights."""
        return [weight.name for site in self.targeted for weight in site.weights]

    def with_rotation(self, rotates_freely: Callable[[], bool]) -> "ResolvedRecipe":
        """Decide ``space.rotate`` where it is open: norms tell only when the model is loaded.

        Args:
            rotates_freely: returns True if the model can be rotated without a new weight; called only where schemes
                have few bits.
        """
        space = self.recipe.space
        if space.rotate is not None:
            return self
        space = replace(space, rotate=space.few_bits and rotates_freely())
        return replace(self, recipe=replace(self.recipe, space=space))
