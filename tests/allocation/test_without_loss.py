"""Dense weights that keep every limit are found before anything is measured that takes long."""

from dataclasses import replace
from typing import Any

import pytest

from gac.allocation.feasibility import meets_without_loss
from gac.forms.planned_sites import as_planned
from gac.measuring import _settled
from gac.models.families import family_of
from gac.models.shapes import SHAPES, Shapes
from gac.profiling.select import select_profile
from gac.profiling.table import Profile
from gac.recipe import Recipe


@pytest.fixture(scope="module")
def profile() -> Profile:
    return select_profile("nvidia-h100-80gb-hbm3")[0]


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return replace(SHAPES["llama-3-8b"], num_hidden_layers=1)


@pytest.mark.parametrize(
    ("options", "met"),
    [
        ({"budget": 1, "latency": 0.95}, True),  # in shared GEMMs
        ({"budget": 1, "latency": 0.95, "fuse": False}, False),
        ({"budget": 1, "latency": 0.5}, False),
        ({"budget": 0.8, "latency": 0.95}, False),
        ({"budget": 1, "memory": 0.5, "latency": 0.95}, False),
    ],
)
def test_forms_that_take_runs_are_left_out_where_nothing_need_be_lost(
    options: dict[str, Any], met: bool, shapes: Shapes, profile: Profile
) -> None:
    recipe = Recipe.of(workloads="decode:1@1024", **{"fuse": "auto"} | options)
    assert recipe.space.forms == ("low_rank", "narrow", "skip")
    planned = as_planned(family_of(shapes).sites(shapes), recipe.space.forms, recipe.deployment.fuse)
    assert meets_without_loss(planned, recipe, profile) is met
    if met or "memory" not in options:
        _, settled = _settled(shapes, replace(recipe, limits=replace(recipe.limits, params=options["budget"])), profile)
        assert settled.space.forms == (("low_rank", "narrow") if met else ("low_rank", "narrow", "skip"))


def test_weights_that_are_rounded_lose(shapes: Shapes, profile: Profile) -> None:
    recipe = Recipe.of(1, schemes="w4a16", latency="any")
    assert not meets_without_loss(family_of(shapes).sites(shapes), recipe, profile)
