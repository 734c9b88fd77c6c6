"""Plans, frontiers, recipes and files of them with something else in them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
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


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    """What is in a JSON file, which is written again with what is changed inside."""
    document = json.loads(path.read_bytes())
    yield document
    path.write_text(json.dumps(document))
