"""Shapes of well-known models, against what their makers count."""

import pytest

from gac.models.families import family_of
from gac.models.shapes import SHAPES


@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("smollm2", 106_168_320),
        ("llama-3-8b", 6_979_321_856),
        ("llama-2-7b", 6_476_005_376),
        ("mistral-7b", 6_979_321_856),
        ("qwen3-8b", 6_945_767_424),
        ("gemma-3-4b", 3_208_642_560),
        ("llama-3-70b", 68_451_041_280),
    ],
)
def test_the_linear_weights_of_the_layers_add_up(name: str, linear: int) -> None:
    """What the model cards give, without embeddings, lm_head and norms."""
    assert sum(site.params for site in family_of(SHAPES[name]).sites(SHAPES[name])) == linear


def test_every_shape_is_of_a_supported_architecture_and_divides() -> None:
    for name, shapes in SHAPES.items():
        assert shapes.model_type in family_of(shapes).model_types, name
        assert shapes.num_attention_heads % shapes.num_key_value_heads == 0, name
