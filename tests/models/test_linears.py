"""How a dense model stores a linear weight, and that everything reads it the same way."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gac.models.linears import as_linear


def test_a_transposed_weight_computes_the_same() -> None:
    torch.manual_seed(0)
    stored = Conv1D(24, 40)
    nn.init.normal_(stored.bias)
    linear = as_linear(stored)
    assert isinstance(linear, nn.Linear)
    assert linear.weight.shape == (24, 40)
    x = torch.randn(2, 3, 40)
    torch.testing.assert_close(linear(x), stored(x))


def test_it_looks_at_the_same_memory() -> None:
    stored = Conv1D(24, 40).to(torch.bfloat16).eval().requires_grad_(False)
    linear = as_linear(stored)
    assert linear.weight.data_ptr() == stored.weight.data_ptr()
    assert linear.bias is stored.bias
    assert (linear.weight.dtype, linear.weight.requires_grad, linear.training) == (torch.bfloat16, False, False)


def test_anything_else_is_left_as_it_is() -> None:
    linear = nn.Linear(3, 2)
    assert as_linear(linear) is linear
