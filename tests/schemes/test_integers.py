"""Weights of few bits: exact bytes, what rounding loses, and plans under a limit of memory."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import gac
from gac.allocation.decide import settled
from gac.errors import BudgetError, CheckpointError, PlanError, ProfileError
from gac.forms import form_named
from gac.forms.planned_sites import as_planned
from gac.models.families import family_of
from gac.models.loading import load_config
from gac.plan import Plan
from gac.plan_summary import allocate_command
from gac.reporting.tables import cell_of, legend_of
from gac.schemes import SCHEMES, scheme_named
from gac.schemes.integers.torch import round_matrix
from gac.testing import check_scheme
from tests.models.small import small_config, weights_of

NAMES = ("w8a16", "w4a16", "w4a16:64", "w4a16:32", "w3a16:64", "w2a16", "w2a16:16")


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_the_contract(name: str) -> None:
    check_scheme(scheme_named(name))


def test_bytes_count_scales_zero_points_and_what_fills_no_group() -> None:
    assert scheme_named("w8a16").bytes(10, 300) == 10 * 300 + 10 * 2
    assert scheme_named("w4a16").bytes(10, 256) == 10 * 128 + 20 * 2 + 10
    assert scheme_named("w4a16").bytes(10, 257) == 1285 + 30 * 2 + 15
    assert scheme_named("w3a16:64").bytes(3, 65) == -(-3 * 65 * 3 // 8) + 6 * 2 + -(-6 * 3 // 8)
    assert scheme_named("w2a16:64").bytes(0, 64) == scheme_named("w2a16:64").bytes(64, 0) == 0


def test_a_weight_costs_the_bytes_of_its_matrices() -> None:
    (weight,) = (one for one in weights_of(small_config("llama")) if one.name.endswith("0.mlp.gate_proj"))
    assert form_named("low_rank").matrices(weight, 8) == ((8, weight.in_features), (weight.out_features, 8))
    assert form_named("narrow").matrices(weight, 24) == ((24, weight.in_features),)
    assert form_named("grouped:2").matrices(weights_of(small_config("llama"))[1], 4)[1][1] == 4


@pytest.mark.parametrize("wrong", ["w4a16:", "w4a16:0", "w4a16:-1", "w4a16:x", "w5a16"])
def test_other_names_are_refused(wrong: str) -> None:
    with pytest.raises(PlanError, match="scheme"):
        SCHEMES.get(wrong)


# --- rounding -------------------------------------------------------------------------------------------------------


def correlated(columns: int) -> Tensor:
    """A second moment with a few strong directions."""
    torch.manual_seed(1)
    root = torch.randn(columns, columns, dtype=torch.float64) * torch.logspace(0, -2, columns, dtype=torch.float64)
    turned = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64))[0]
    return turned @ root @ root.T @ turned.T


def rounded(matrix: Tensor, *given: object, **named: object) -> Tensor:
    return round_matrix(matrix, *given, **named).values(matrix.dtype)  # type: ignore[arg-type]


def lost(matrix: Tensor, rounded: Tensor, inputs: Tensor) -> float:
    error = rounded - matrix
    return float(((error @ inputs) * error).sum())


@pytest.mark.parametrize("columns", [96, 200, 300])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_feedback_loses_much_less_of_the_product(bits: int, columns: int) -> None:
    inputs = correlated(columns)
    matrix = torch.randn(24, columns, dtype=torch.float64)
    nearest, told = (rounded(matrix, seen, bits, 64, zero=True) for seen in (None, inputs))
    assert lost(matrix, told, inputs) < 0.5 * lost(matrix, nearest, inputs)


def test_the_loss_falls_with_bits_and_with_smaller_groups() -> None:
    inputs = correlated(256)
    matrix = torch.randn(16, 256, dtype=torch.float64)
    by_bits = [lost(matrix, rounded(matrix, inputs, bits, 64, zero=True), inputs) for bits in (2, 3, 4, 8)]
    assert by_bits == sorted(by_bits, reverse=True)
    by_group = [lost(matrix, rounded(matrix, inputs, 3, size, zero=True), inputs) for size in (256, 64, 16)]
    assert by_group == sorted(by_group, reverse=True)


@pytest.mark.parametrize("zero", [True, False])
def test_what_is_on_the_grid_stays(zero: bool) -> None:
    inputs = correlated(100)
    numbers = torch.randint(0 if zero else 1, 16, (8, 100)).double()
    numbers[:, ::32], numbers[:, 1::32] = 15, 0 if zero else 1
    numbers[:, 96:98] = torch.tensor([15.0, 0.0 if zero else 1.0], dtype=torch.float64)
    matrix = 0.125 * (numbers - 8)
    for seen in (None, inputs):
        assert torch.equal(rounded(matrix, seen, 4, 32, zero), matrix)


def test_feedback_without_blocks_is_the_same() -> None:
    """Against the plain sweep, a column at a time over all that follow."""
    inputs, matrix = correlated(300), torch.randn(4, 300, dtype=torch.float64)
    found = rounded(matrix, inputs, 4, None, zero=True)
    moment = inputs + 1e-2 * inputs.diagonal().mean() * torch.eye(300, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(moment)).T
    levels = [torch.unique(row) for row in found]
    work = matrix.clone()
    for at in range(300):
        nearest = torch.stack(
            [own[(own - value).abs().argmin()] for own, value in zip(levels, work[:, at], strict=True)]
        )
        assert torch.allclose(nearest, found[:, at], atol=1e-9)
        work[:, at + 1 :] -= ((work[:, at] - nearest) / upper[at, at])[:, None] * upper[at, at + 1 :]


# --- plans ----------------------------------------------------------------------------------------------------------


def planned(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: Path, **options: object) -> Plan:
    given = {"calibration": f"{text}:4x32", "profile": "nvidia-h100-80gb-hbm3", "align": 8, "tokenizer": tokenizer}
    return gac.allocate(model, **(given | options))


@pytest.mark.parametrize("refit", ["none", "residual"])
def test_memory_is_shared_out_over_forms_dims_and_schemes(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path, refit: str
) -> None:
    schemes = ("bf16", "w8a16", "w4a16:32", "w2a16:32")
    plan = planned(tiny_model, tiny_tokenizer, text_file, memory=0.4, schemes=schemes, refit=refit)
    used, whole = next((limit.used, limit.total) for limit in plan.limits if limit.column == "bytes")
    taken = [(form_named(one.form), scheme_named(one.scheme), one) for one in plan.weights]
    counted = [scheme.bytes(*shape) for form, scheme, one in taken for shape in form.matrices(one.weight, one.dim)]
    assert used == sum(counted) <= 0.4 * whole
    assert len({one.scheme for one in plan.weights}) > 1
    assert plan.certificate.status == "optimal"
    assert {limit.column for limit in plan.limits} == {"params", "bytes"}
    small = gac.compress(copy.deepcopy(tiny_model), plan, tokenizer=tiny_tokenizer)
    for one in plan.weights:
        if one.scheme == "w2a16:32" and one.form == "dense":
            weight = small.get_submodule(one.name).weight
            assert all(len(part.unique()) <= 4 for part in weight.reshape(-1, 32))


def test_fewer_bytes_than_any_plan_has_are_refused(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path
) -> None:
    with pytest.raises(BudgetError, match=r"bytes .*at least [0-9,]+, the smallest.* Ask for memory of 0\.08"):
        planned(tiny_model, tiny_tokenizer, text_file, memory=0.01, schemes=("w8a16", "w4a16"), forms=("narrow",))


def test_it_is_not_saved_in_16_bits(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path, tmp_path: Path
) -> None:
    plan = planned(tiny_model, tiny_tokenizer, text_file, memory=0.6, schemes=("w8a16",))
    small = gac.compress(copy.deepcopy(tiny_model), plan, tokenizer=tiny_tokenizer)
    with pytest.raises(CheckpointError, match="weights in w8a16; expected schemes of 16 bits"):
        gac.save(small, tmp_path / "small", tokenizer=tiny_tokenizer)
    assert not (tmp_path / "small").exists()


def test_the_summary_says_bytes_bits_and_schemes(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path
) -> None:
    plan = planned(tiny_model, tiny_tokenizer, text_file, budget=1.0, schemes=("w4a16:64",), forms=("low_rank",))
    used, whole = plan.bytes
    told = str(plan)
    assert f"memory       {used:,} of {whole:,} bytes: {used / whole:.4f} kept" in told
    model, dense = plan.model_bytes
    parameters = sum(parameter.numel() for parameter in tiny_model.parameters())
    assert (dense, dense - model) == (2 * parameters, whole - used)
    assert f"{model:,} of {dense:,} bytes of the whole model: {model / dense:.4f} kept;" in told
    bits = f"{16 * used / whole:.2f} bits per dense parameter, {8 * model / parameters:.2f} in the whole model"
    assert f"{bits}; {len(plan.weights)} w4a16:64" in " ".join(told.split())
    assert "--scheme w4a16:64" in allocate_command(plan)
    assert "w4a16:64: rounded" in legend_of(plan)
    assert {cell_of(one).split(" ")[-1] for one in plan.weights} == {"w4a16:64"}
    plain = planned(tiny_model, tiny_tokenizer, text_file, budget=0.9)
    assert "14 bf16" in str(plain)


def test_a_limit_of_latency_needs_a_profile_of_the_scheme() -> None:
    config, profile = load_config("smollm2"), gac.Profile.load("nvidia-h100-80gb-hbm3")
    sites = as_planned(family_of(config).sites(config), ["low_rank", "narrow"], fused=False)
    rounded = settled(gac.Recipe.of(memory=0.3, schemes=("w4a16",)), sites, profile)
    assert (rounded.limits.latency, rounded.slack) == ({}, 0.0)
    plain = settled(gac.Recipe.of(memory=0.5), sites, profile)
    assert (plain.limits.latency, plain.slack) == ({"prefill:1x1024": 1.0, "decode:1@1024": 1.0}, 0.01)
    with pytest.raises(ProfileError, match=r"prefill:1x1024 with scheme w4a16, which the profile does not have"):
        settled(gac.Recipe.of(memory=0.3, latency=0.9, schemes=("bf16", "w4a16")), sites, profile)
