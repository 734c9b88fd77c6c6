"""Plans, frontiers and recipes with something else asked for or measured."""

from dataclasses import replace
from typing import Any, TypeVar

from gac.allocation.frontier import Frontier
from gac.plan.plan import Plan
from gac.plan.recipe import Recipe

Made = TypeVar("Made", Plan, Frontier)


def changed_recipe(recipe: Recipe, **options: Any) -> Recipe:
    """The recipe with other options, as ``Recipe.of`` takes them."""
    plain = recipe.flat()
    return Recipe.of(**plain | {"calibration": plain.pop("text")} | options)


def with_recipe(made: Made, **options: Any) -> Made:
    return replace(made, recipe=changed_recipe(made.recipe, **options))


def with_measured(made: Made, **changes: Any) -> Made:
    return replace(made, measured=replace(made.measured, **changes))
