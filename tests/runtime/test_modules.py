import pytest
import torch

from gac.compression.modules import empty_module
from gac.models.weights import Weight
from gac.plan import WeightChoice
from gac.runtime.modules import LowRankLinear

CHOICES = [
    WeightChoice(Weight("q", 24, 40), "dense", 24),
    WeightChoice(Weight("q", 24, 40), "low_rank", 8),
    WeightChoice(Weight("q", 40, 24), "low_rank", 7),
    WeightChoice(Weight("up", 24, 40, "out"), "narrow", 16),
    WeightChoice(Weight("down", 24, 40, "in"), "narrow", 16),
    WeightChoice(Weight("gate_up", 24, 40, "out", blocks=2), "narrow", 8),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_it_has_the_parameters_that_the_plan_counts(choice: WeightChoice, bias: bool) -> None:
    module = empty_module(choice, bias, "cpu", torch.float32)
    counted = sum(parameter.numel() for name, parameter in module.named_parameters() if not name.endswith("bias"))
    assert counted == choice.params
    assert any(name.endswith("bias") for name, _ in module.named_parameters()) == bias


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_runs_at_the_widths_of_its_form(choice: WeightChoice, dtype: torch.dtype) -> None:
    module = empty_module(choice, True, "cpu", dtype)
    inside = choice.dim if (choice.form, choice.weight.neurons) == ("narrow", "in") else choice.weight.in_features
    outside = (
        choice.weight.blocks * choice.dim
        if (choice.form, choice.weight.neurons) == ("narrow", "out")
        else choice.weight.out_features
    )
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    y = module(torch.randn(2, 3, inside, dtype=dtype))
    assert (y.shape, y.dtype) == ((2, 3, outside), dtype)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_on_meta_nothing_is_allocated_and_nowhere_are_random_numbers_drawn(choice: WeightChoice) -> None:
    before = torch.get_rng_state()
    built = [empty_module(choice, True, device, torch.float32) for device in ("cpu", "meta")]
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.device.type for parameter in built[1].parameters()} == {"meta"}
    assert {type(one) for one in built[0].modules() if not [*one.children()]} == {torch.nn.Linear}


def test_a_low_rank_pair_is_the_product_of_its_factors() -> None:
    torch.manual_seed(0)
    pair = LowRankLinear(40, 8, 24)
    for parameter in pair.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 40)
    assert repr(pair).splitlines()[1].strip() == "in_features=40, rank=8, out_features=24"
    product = x @ (pair.second.weight @ pair.first.weight).T + pair.second.bias
    torch.testing.assert_close(pair(x), product)
