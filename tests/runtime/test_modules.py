"""How modules are made. That they hold what their form counts and run is the contract of a form."""

import pytest
import torch

from gac.compression.apply import empty_module
from gac.models.sites import Weight
from gac.plan.plan import WeightChoice
from gac.runtime.modules import empty_linear

CHOICES = [
    WeightChoice(Weight("q", 24, 40), "dense", 24),
    WeightChoice(Weight("q", 24, 40), "low_rank", 8),
    WeightChoice(Weight("up", 24, 40, "out"), "narrow", 16),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_on_meta_nothing_is_allocated_and_nowhere_are_random_numbers_drawn(choice: WeightChoice) -> None:
    before = torch.get_rng_state()
    built = [empty_module(choice, True, device, torch.float32) for device in ("cpu", "meta")]
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.device.type for parameter in built[1].parameters()} == {"meta"}
    assert {type(one) for one in built[0].modules() if not [*one.children()]} == {torch.nn.Linear}


def test_a_linear_is_made_on_the_default_device() -> None:
    with torch.device("meta"):
        assert empty_linear(2, 3, bias=True).weight.is_meta
