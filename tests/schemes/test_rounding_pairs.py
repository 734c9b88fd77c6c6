"""Rounding low-rank pairs: their latents rotated, the second factor for the first, and a price at every rank."""

import pytest
import torch
from torch import Tensor

from gac.compression.rounding import store
from gac.forms import form_named
from gac.forms.curvature.metric import FACTOR
from gac.forms.decomposition import with_rotated_latents
from gac.forms.tensors import tensors_of
from gac.runtime.modules import LowRankLinear
from gac.runtime.storage.modules import plain_state
from gac.schemes import scheme_named
from gac.schemes.feedback.order import Inputs
from tests.schemes.pairs import normal, pair_statistics


def lost(error: Tensor, inputs: Tensor) -> float:
    return float(((error.double() @ inputs) * error.double()).sum())


def test_the_product_stays_when_latents_are_rotated() -> None:
    second, first = normal(30, 24), normal(24, 40, seed=1)
    other = with_rotated_latents(second, first)
    assert torch.allclose(other[0] @ other[1], second.double() @ first.double())
    assert not torch.allclose(other[1], first.double())


def test_rotated_latents_make_up_for_one_another() -> None:
    """In order of their variances feedback leaves the arithmetic mean of them; rotated, the geometric one."""
    matrix, latents = normal(48, 64).double(), torch.logspace(0, -4, 64, dtype=torch.float64).diag()
    other, basis = with_rotated_latents(matrix, torch.eye(64))
    seen, scheme = basis @ latents @ basis.T, scheme_named("w4a16:32")
    plain = lost(scheme.quantised(matrix, Inputs(latents)) - matrix, latents)
    assert lost(scheme.quantised(other, Inputs(seen)) - other, seen) < 0.4 * plain


def test_the_second_factor_is_solved_for_the_first_as_it_was_rounded() -> None:
    scheme, module, x = scheme_named("w2a16:8"), LowRankLinear(40, 12, 30, bias=False), normal(400, 40, seed=4)
    for seed, own in enumerate(module.parameters()):
        own.data = normal(*own.shape, seed=seed)
    inputs = (x.T @ x / len(x)).double()
    dense = (module.second.weight @ module.first.weight).detach()
    second, first = with_rotated_latents(module.second.weight.detach(), module.first.weight.detach())
    state = plain_state(store(scheme, module, inputs), torch.float32)
    first = scheme.quantised(first, Inputs(inputs)).float()
    assert torch.equal(state["first.weight"], first)
    seen = first.double() @ inputs @ first.double().T
    as_it_was = scheme.quantised(second, Inputs(seen)).float()
    solved, not_solved = (lost(dense - one @ first, inputs) for one in (state["second.weight"], as_it_was))
    assert solved < not_solved


@pytest.mark.usefixtures("usual_blocks")
@pytest.mark.parametrize("name", ["w8a16", "w4a16:32", "w3a16:32"])
@pytest.mark.parametrize(("outs", "ins"), [(96, 128), (160, 96)])
def test_one_rounding_prices_every_rank(outs: int, ins: int, name: str) -> None:
    statistics, weight, _ = pair_statistics(outs, ins)
    form, metric, scheme = form_named("low_rank"), statistics.metric(weight), scheme_named(name)
    price = tensors_of(form).rounding(statistics, weight, scheme, Inputs(metric.inputs))
    second, first = (statistics.artifacts.of(form, one, weight) for one in ("second", "first"))
    for rank in (16, 24, 48, 56):
        module = LowRankLinear(ins, rank, outs, bias=False)
        module.second.weight.data, module.first.weight.data = second[:, :rank].clone(), first[:rank].clone()
        state = plain_state(store(scheme, module, metric.inputs), torch.float64)
        error = state["second.weight"] @ state["first.weight"] - second[:, :rank].double() @ first[:rank].double()
        measured = FACTOR * float(((metric.gradients @ error @ metric.inputs) * error).sum())
        assert 0.6 < float(price[rank]) / measured < 1.3
