"""V truncated by itself and folded into o_proj: the same model as without folding, with a shorter cache."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gac.core.linalg import damped
from gac.forms.curvature.metric import MeasuredWeight, Metric
from gac.forms.curvature.registry import METHODS
from gac.forms.latent.torch import decompose_groups
from tests.compression.applying import IDS, applied, logits
from tests.compression.compressed import MakePlan

HEADS, GROUPS, HEAD_DIM = 4, 2, 8
FOLD = METHODS.get("palu-fold").fold


@pytest.fixture
def values() -> MeasuredWeight:
    torch.manual_seed(0)
    inputs = torch.randn(100, 24)
    metric = Metric(damped(inputs.T @ inputs / 100, 1e-6), 0.3 * torch.eye(GROUPS * HEAD_DIM, dtype=torch.float64))
    return MeasuredWeight(torch.randn(GROUPS * HEAD_DIM, 24), metric)


@pytest.fixture
def output() -> Tensor:
    return torch.randn(24, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(1))


def by_heads(groups: Tensor) -> Tensor:
    """The rows that each query head reads of v_proj's rows, one head above the other."""
    return groups.view(GROUPS, -1, groups.shape[1]).repeat_interleave(HEADS // GROUPS, 0).flatten(0, 1)


@pytest.mark.parametrize("length", [1, 5, HEAD_DIM])
def test_the_product_is_that_of_the_truncated_values(values: MeasuredWeight, output: Tensor, length: int) -> None:
    folded_values = FOLD(values, output, HEADS, GROUPS)
    pairs = [group.factors(length) for group in decompose_groups(values.weight, values.metric, GROUPS)[0]]
    truncated = by_heads(torch.cat([second @ first for second, first in pairs]))
    folded = torch.einsum(
        "ohl,hli->ohi",
        folded_values.outputs(length, values.metric).view(24, HEADS, length),
        by_heads(folded_values.values(values.weight, length)).view(HEADS, length, 24),
    )
    unfolded = torch.einsum("ohd,hdi->ohi", output.double().view(24, HEADS, -1), truncated.view(HEADS, -1, 24))
    assert torch.allclose(folded, unfolded)


def test_a_folded_model_is_the_model_with_groups_of_one_head(
    tiny_config: LlamaConfig, tiny_model: LlamaForCausalLM, make_plan: MakePlan
) -> None:
    v_proj, o_proj = (f"model.layers.1.self_attn.{name}" for name in ("v_proj", "o_proj"))
    torch.manual_seed(0)
    other = LlamaForCausalLM(tiny_config).eval()
    grouped = applied(tiny_model, make_plan(tiny_config, {v_proj: ("latent:1", 6)}), "palu:1")
    folded: Any = applied(other, make_plan(tiny_config, dict.fromkeys((v_proj, o_proj), ("head_dim", 6))), "palu-fold")
    assert (logits(folded) - logits(grouped)).abs().max() < 1e-5
    with torch.no_grad():
        assert folded(IDS, use_cache=True).past_key_values.layers[1].values.shape == (2, 2, 20, 6)
