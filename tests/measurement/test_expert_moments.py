"""Moments of what experts read: those of their own tokens, and the layer's mean where there are few."""

from typing import Any

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from gac.forms.curvature.metric import RoutedTokens
from gac.forms.experts.elimination import Routing
from gac.forms.experts.moments import expert_moments
from gac.schemes import scheme_named
from gac.schemes.feedback.order import Inputs


@pytest.fixture(name="layer")
def _layer() -> tuple[Any, RoutedTokens]:
    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=32, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)
    block = MixtralSparseMoeBlock(config).requires_grad_(False)
    for values in block.parameters():
        values.normal_(std=0.2)
    mixing = torch.randn(32, 32)
    tokens = RoutedTokens(torch.randn(512, 32) @ mixing, torch.rand(512) + 0.5, torch.eye(32))
    return block, tokens


def test_are_of_the_tokens_that_reach_each_expert(layer: tuple[Any, RoutedTokens]) -> None:
    block, tokens = layer
    routing = Routing(block.gate, tokens.inputs)
    moments = expert_moments(block.experts, routing, tokens)
    numbers, _ = routing.weights(routing.experts)
    assert moments.reached.tolist() == torch.bincount(numbers.flatten(), minlength=4).tolist()
    assert moments.inputs.shape == (4, 32, 32)
    assert moments.neurons.shape == (4, 16, 16)
    assert torch.linalg.eigvalsh(moments.inputs).min() > -1e-6


def test_feedback_with_them_loses_less(layer: tuple[Any, RoutedTokens]) -> None:
    block, tokens = layer
    moments, scheme = expert_moments(block.experts, Routing(block.gate, tokens.inputs), tokens), scheme_named("w4a16")

    def lost(expert: int, inputs: Inputs | None) -> float:
        matrix = block.experts.gate_up_proj[expert]
        error = (scheme.quantised(matrix, inputs) - matrix).double()
        return float(((error @ moments.inputs[expert]) * error).sum())

    for expert in range(4):
        assert lost(expert, Inputs(moments.inputs[expert])) < lost(expert, None)
