"""Dense weights that keep every limit are found before anything is measured that takes long."""

from typing import Any

import pytest
from transformers import LlamaConfig

from gac.allocation.feasibility import meets_without_loss
from gac.allocation.resolve import resolve
from gac.forms.planned_sites import as_planned
from gac.models.families import family_of
from gac.plan.evidence import ProfileUsed
from gac.plan.recipe import Recipe
from gac.profiling.select import select_profile
from gac.profiling.table import Profile


@pytest.fixture(scope="module")
def profile() -> Profile:
    return select_profile("nvidia-h100-80gb-hbm3")[0]


@pytest.fixture(scope="module")
def config() -> LlamaConfig:
    """Llama-3-8B with two layers; the first can never be skipped."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, **heads)


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
    options: dict[str, Any], met: bool, config: LlamaConfig, profile: Profile
) -> None:
    recipe = Recipe.of(workloads="decode:1@1024", **{"fuse": "auto"} | options)
    assert recipe.space.forms == ("low_rank", "narrow", "skip")
    planned = as_planned(family_of(config).sites(config), recipe.space.forms, recipe.deployment.fuse)
    assert meets_without_loss(planned, recipe, profile) is met
    resolved = resolve(recipe, config, profile, ProfileUsed(profile.header.gpu, profile.digest, "named"))
    assert resolved.recipe.space.forms == recipe.space.forms[: 2 if met else 3]
