"""Scaling a model's logits to another's confidence, and the last norm that takes the scale, in every architecture."""

import pytest
import torch
from torch import Tensor

from gac.compression import refit
from gac.compression.refit import fitted_scale, scaled_norm
from gac.core.errors import ModelError
from gac.measurement.calibration import decoder_layers
from gac.models.families import family_of
from gac.models.layer_stack import LayerStack
from tests.compression.applying import divergence
from tests.models.small import every_layout, small_config, small_model, weights_of

IDS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))


def pair(factor: float, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    own = torch.randn(400, 50)
    return own * factor, own + noise * torch.randn_like(own)


def test_logits_that_are_a_little_too_large_get_their_size_back() -> None:
    assert fitted_scale([pair(0.95)]) == pytest.approx(0.95, abs=0.003)
    assert fitted_scale([pair(1.0)]) == pytest.approx(1, abs=1e-6)
    both = [pair(0.95), pair(1.05)]
    assert fitted_scale(both[:1]) < fitted_scale(both) < fitted_scale(both[1:])


def test_noise_is_answered_by_less_confidence() -> None:
    other, own = pair(1.0, 0.3)
    found = fitted_scale([(other, own)])
    assert found < 0.97
    nearby = [divergence(other, (found + step) * own) for step in (-0.05, 0.05)]
    assert divergence(other, found * own) < min(*nearby, divergence(other, own))


def test_the_scale_stays_near_1() -> None:
    assert [fitted_scale([pair(factor)]) for factor in (0.0, 9.0)] == [refit.LEAST, refit.MOST]
    assert fitted_scale([(torch.zeros(2, 5), torch.zeros(2, 5))]) == 1


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ModelError, match="finite"):
        fitted_scale([(torch.zeros(2, 5), torch.full((2, 5), torch.nan))])


@every_layout
def test_the_last_norm_scales_what_the_head_reads(model_type: str) -> None:
    model = small_model(small_config(model_type))
    name = family_of(model.config).last_norm
    norm = model.get_submodule(name)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    hidden, before = torch.randn(5, norm.get_parameter("weight").numel()), norm.get_parameter("weight").clone()
    copied = scaled_norm(norm, 0.9)
    torch.testing.assert_close(copied(hidden), 0.9 * norm(hidden))
    assert torch.equal(norm.get_parameter("weight"), before)
    read: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _m, given: read.append(given[0]))
    with torch.no_grad():
        model(IDS)
        model.set_submodule(name, copied)
        model(IDS)
    torch.testing.assert_close(read[1], 0.9 * read[0])


@every_layout
def test_logits_of_a_last_layers_output_are_the_models(model_type: str) -> None:
    model = small_model(small_config(model_type, num_hidden_layers=3)).eval()
    weights = weights_of(model.config)
    layers = decoder_layers(model, {layer: [w for w in weights if f".{layer}." in w.name] for layer in range(3)})
    stack = LayerStack(model, layers)
    entered: dict[int, Tensor] = {}
    with torch.no_grad():
        with stack.traced(0, entered.__setitem__):
            expected = model(IDS[:1], use_cache=False).logits[0]
        found = stack.logits(IDS[0], stack.run(2, entered[2]))
        assert torch.equal(found, expected)
        assert torch.equal(model(IDS[:1]).logits[0], expected), "the layers are as they were"


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    model = small_model(small_config("llama", num_hidden_layers=2)).eval()
    layers = list(model.model.layers)
    own = type(layers[0]).forward.__get__(layers[0])
    layers[0].forward = own
    stack = LayerStack(model, layers)
    entered: dict[int, Tensor] = {}
    with torch.no_grad(), stack.traced(0, entered.__setitem__):
        model(IDS[:1], use_cache=False)
    with torch.no_grad():
        stack.logits(IDS[0], stack.run(1, entered[1]))
    assert layers[0].forward is own
    assert "forward" not in layers[1].__dict__
