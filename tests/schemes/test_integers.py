"""Weights of few bits: exact bytes, what rounding loses, and plans under a limit of memory."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

import gac
from gac.allocation.resolve import SLACK, speed_defaults
from gac.core.errors import BudgetError, ModelError, PlanError, ProfileError
from gac.core.linalg import damped
from gac.forms import form_named
from gac.forms.planned_sites import as_planned
from gac.measurement import calibration
from gac.measurement.layerwise import LayerwiseBackward
from gac.models.families import family_of
from gac.models.loading import load_config
from gac.plan.recipe import Recipe
from gac.schemes import SCHEMES, scheme_named, scheme_timed_as
from gac.schemes.base import LARGEST_SCALE
from gac.schemes.eight_bits.float8 import Float8Levels
from gac.schemes.feedback import order as orders
from gac.schemes.feedback import rounding
from gac.schemes.feedback.levels import Levels, sweep
from gac.schemes.feedback.order import Inputs
from gac.schemes.floats4.levels import Float4Levels
from gac.schemes.integers import levels as integer_levels
from gac.schemes.integers.grids import SMALLEST_SCALE, fit_grid, in_16_bits, nearest_numbers
from gac.schemes.integers.levels import IntegerLevels
from gac.schemes.matrices import Grid, quantise_matrix
from tests.compression.stored import held_bytes
from tests.small_pipeline import Small, has_state

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels need a GPU")


def test_bytes_count_words_scales_zero_points_and_what_fills_no_group() -> None:
    assert scheme_named("w8a16").bytes(10, 300) == 10 * 300 + 10 * 2
    assert scheme_named("w8a16").bytes(10, 301) == 10 * 304 + 10 * 2
    assert scheme_named("w4a16").bytes(16, 256) == 16 * 128 + 32 * 2 + 16
    assert scheme_named("w4a16").bytes(10, 257) == 10 * 33 * 4 + 30 * 2 + 3 * 2 * 4
    assert scheme_named("w3a16:64").bytes(32, 64) == 32 * 64 * 3 // 8 + 32 * 2 + 32 * 3 // 8
    assert scheme_named("w3a16:64").bytes(3, 65) == 3 * 7 * 4 + 6 * 2 + 2 * 4
    assert scheme_named("w2a16:64").bytes(0, 64) == scheme_named("w2a16:64").bytes(64, 0) == 0
    assert scheme_named("nvfp4a16").bytes(10, 256) == 10 * (256 * 4.5 // 8 + 4)  # and a number of 32 bits a row
    assert scheme_named("nvfp4a16").bytes(10, 257) == 10 * (129 + 17 + 4)
    assert scheme_named("mxfp4a16").bytes(10, 256) == 10 * 256 * 4.25 // 8
    assert scheme_named("mxfp4a16").bytes(10, 257) == 10 * (129 + 9)


def test_its_own_size_of_groups_is_no_other_scheme_and_other_names_are_refused() -> None:
    assert SCHEMES.get("w4a16:128") is SCHEMES.get("w4a16")
    assert scheme_timed_as("w4a16:128") is SCHEMES.get("w4a16")
    assert Recipe.of(memory=0.3, schemes=("w4a16", "w4a16:128", "w4a16:64")).space.schemes == ("w4a16", "w4a16:64")
    for wrong in ("w4a16:", "w4a16:0", "w4a16:-1", "w4a16:x", "w99a16"):
        with pytest.raises(PlanError, match="scheme"):
            SCHEMES.get(wrong)


def correlated(columns: int) -> Tensor:
    """A second moment with a few strong directions."""
    torch.manual_seed(1)
    root = torch.randn(columns, columns, dtype=torch.float64) * torch.logspace(0, -2, columns, dtype=torch.float64)
    turned = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64))[0]
    return turned @ root @ root.T @ turned.T


def quantised(
    matrix: Tensor, inputs: Inputs | None, bits: int, group: int | None, zero: bool = True, rows: Tensor | None = None
) -> Grid:
    return quantise_matrix(matrix, inputs, IntegerLevels(2**bits - 1, zero), group, rows)


def lost(matrix: Tensor, rounded: Tensor, inputs: Tensor) -> float:
    error = rounded - matrix
    return float(((error @ inputs) * error).sum())


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("w2a16:64", 96),
        ("w3a16:64", 300),
        ("w8a16", 200),
        ("fp8", 96),
        ("fp8_block", 300),
        ("nvfp4a16", 96),
        ("mxfp4a16", 300),
    ],
)
def test_feedback_loses_much_less_of_the_product(name: str, columns: int) -> None:
    inputs, matrix = correlated(columns), torch.randn(24, columns, dtype=torch.float64)
    nearest, compensated = (scheme_named(name).quantised(matrix, seen) for seen in (None, Inputs(inputs)))
    assert lost(matrix, compensated, inputs) < 0.5 * lost(matrix, nearest, inputs)


@pytest.mark.parametrize("zero", [True, False])
def test_what_is_on_the_grid_stays(zero: bool) -> None:
    inputs = correlated(100)
    numbers = torch.randint(0 if zero else 1, 16, (8, 100)).double()
    numbers[:, ::32], numbers[:, 1::32] = 15, 0 if zero else 1
    numbers[:, 96:98] = torch.tensor([15.0, 0.0 if zero else 1.0], dtype=torch.float64)
    matrix = 0.125 * (numbers - 8)
    for seen in (None, Inputs(inputs)):
        assert torch.equal(quantised(matrix, seen, 4, 32, zero).values().double(), matrix)


def swept(row: Tensor, inputs: Tensor, levels: list[Tensor]) -> Tensor:
    """Each number in turn to the nearest of the levels of its group, over all that follow."""
    upper = torch.linalg.cholesky(torch.linalg.inv(damped(inputs, 1e-2))).T
    work, size = row.clone(), -(-len(row) // len(levels))
    for column, value in enumerate(row):
        value, of_group = work[column].clone(), levels[column // size]
        work[column] = of_group[(of_group - value).abs().argmin()]
        work[column + 1 :] -= (value - work[column]) / upper[column, column] * upper[column, column + 1 :]
    return work


def levels_of(grid: Grid, row: int) -> list[Tensor]:
    """Every number that each group of a row can be."""
    numbers = torch.arange(int(grid.levels.most) + 1)
    return [
        scale.double() * (numbers - zero.double()) for scale, zero in zip(grid.scale[row], grid.zero[row], strict=True)
    ]


def sorted_inputs(columns: int) -> Tensor:
    """Those of large inputs first, which is the order in which columns are rounded."""
    inputs = correlated(columns)
    order = inputs.diagonal().argsort(descending=True)
    return inputs[order][:, order]


@pytest.mark.parametrize("columns", [60, 300])
def test_feedback_in_parts_is_the_plain_sweep(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_levels.IntegerLevels, "improved", Levels.improved)
    inputs, matrix = sorted_inputs(columns), torch.randn(4, columns, dtype=torch.float64)
    grid = quantised(matrix, Inputs(inputs), 4, None)
    for row, expected in enumerate(grid.values().double()):
        assert torch.allclose(swept(matrix[row], inputs, levels_of(grid, row)), expected, atol=1e-9)


@pytest.mark.parametrize("group", [16, None])
def test_feedback_through_both_sides_is_the_plain_sweep(group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a block in turn, each for the errors of those before it; the blocks by themselves; a group in pieces."""
    monkeypatch.setattr(rounding, "ROWS", 5)
    monkeypatch.setattr(orders, "COLUMNS", 16)
    inputs, gradients, matrix = sorted_inputs(48), correlated(12), torch.randn(12, 48, dtype=torch.float64)
    grid = quantised(matrix, Inputs(inputs), 3, group, rows=gradients)
    moment, work = damped(gradients, 1e-2), matrix.clone()
    for start in range(0, 12, 5):
        block = slice(start, min(start + 5, 12))
        upper = torch.linalg.cholesky(torch.linalg.inv(moment[block, block])).T
        for row in range(start, block.stop):
            expected = grid.values()[row].double()
            assert torch.allclose(swept(work[row], inputs, levels_of(grid, row)), expected, atol=1e-9)
            shares = upper[row - start, row - start + 1 :] / upper[row - start, row - start]
            work[row + 1 : block.stop] -= shares[:, None] * (work[row] - expected)


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 50), (2, None)])
def test_scales_and_numbers_improved_in_turn_lose_less(bits: int, group: int | None) -> None:
    moment, matrix = correlated(200), torch.randn(24, 200, dtype=torch.float64)
    quick, thorough = (
        quantised(matrix, Inputs(moment, thorough=improve), bits, group).values().double() for improve in (False, True)
    )
    assert lost(matrix, thorough, moment) < 0.97 * lost(matrix, quick, moment)


def test_inputs_that_several_are_told_of_change_nothing() -> None:
    moment, matrices = correlated(200), [torch.randn(rows, 200, dtype=torch.float64) for rows in (24, 7)]
    shared = Inputs(moment)
    for scheme in map(scheme_named, ("w8a16", "w4a16:64", "w3a16:32")):
        for matrix in matrices:
            assert torch.equal(scheme.quantised(matrix, shared), scheme.quantised(matrix, Inputs(moment)))


@pytest.mark.usefixtures("usual_blocks")
def test_gradients_that_are_correlated_lower_the_loss() -> None:
    inputs, gradients, matrix = correlated(96), correlated(150), torch.randn(150, 96, dtype=torch.float64)

    def loss(rows: Tensor | None) -> float:
        error = quantised(matrix, Inputs(inputs), 3, 32, rows=rows).values() - matrix
        return float(((gradients @ error @ inputs) * error).sum())

    assert loss(gradients) < 0.8 * loss(None)


@on_gpu
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("levels", [IntegerLevels(15, zero=True), Float8Levels(), Float4Levels(power=False)])
@pytest.mark.parametrize(("pairs", "rows", "width"), [(1, 3, 5), (3, 70, 64), (1, 33, 116)])
def test_the_kernel_rounds_as_a_cpu_does(pairs: int, rows: int, width: int, levels: Levels, own: bool) -> None:
    torch.manual_seed(0)
    units, takes = 16 * torch.rand(pairs, rows, width).double(), torch.randn(pairs, width, width).double()
    units *= torch.logspace(-3, 1.3, rows).double()[:, None] if levels.floating else 1
    before = units.round() if own else None
    expected = sweep(units, takes, levels, before)
    found = sweep(units.cuda(), takes.cuda(), levels, None if before is None else before.cuda())
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine.cpu(), theirs, atol=1e-9)


@on_gpu
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("most", [3, 255])
@pytest.mark.parametrize("shape", [(2, 3, 1), (3, 40, 64), (70, 2, 130), (9, 4500)])
def test_the_kernel_fits_a_grid_as_good_as_a_cpu_does(shape: tuple[int, ...], most: int, zero: bool) -> None:
    """Of one column to more than are read at once; scales from none to more than float16 holds; weights of all rows."""
    torch.manual_seed(0)
    values = torch.randn(shape).double() * torch.logspace(-9, 8, shape[-2]).double()[:, None]
    values[..., 0, :] = 0
    for weighs in (torch.rand(shape[-1]).double(), torch.rand(*shape[:-2], shape[-1]).double()):
        expected, found = fit_grid(values, weighs, most, zero), fit_grid(values.cuda(), weighs.cuda(), most, zero)
        errors = []
        for scale, zeros in ([part.cpu() for part in found], expected):
            assert scale.shape == zeros.shape == expected[0].shape
            nearest = (nearest_numbers(values, scale, zeros, most) - zeros) * scale
            errors.append((nearest - values).square() @ weighs[..., None])
        assert torch.allclose(*errors, rtol=1e-12, atol=0, equal_nan=True)


def test_memory_is_shared_out_and_what_is_evaluated_is_what_is_saved(
    small: Small, directory: Path, tmp_path: Path
) -> None:
    dense = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    schemes = ("bf16", "w8a16", "w4a16:32", "w3a16:32", "w2a16:32")
    plan = small.allocate(None, dense, memory=0.3, schemes=schemes, refit="residual", align=8)
    assert {limit.column for limit in plan.limits} == {"params", "bytes"}
    assert plan.certificate.status == "optimal"
    assert len({choice.scheme for choice in plan.weights}) > 1
    counted = [
        scheme_named(choice.scheme).bytes(*shape)
        for choice in plan.weights
        for shape in form_named(choice.form).latency.matrices(choice.weight, choice.dim)
    ]
    rounded, _ = small.there_and_back(plan, tmp_path, dense)
    for choice in plan.weights:
        if choice.scheme == "w2a16:32" and choice.form == "dense":
            weight = rounded.get_submodule(choice.name).values(torch.float32)
            assert all(len(group.unique()) <= 4 for group in weight.reshape(-1, 32))
    tensors = load_file(tmp_path / "small" / "model.safetensors")
    assert held_bytes(tensors, plan) == plan.bytes[0] == sum(counted) <= 0.3 * plan.bytes[1]


def test_fewer_bytes_than_any_plan_has_are_refused(small: Small) -> None:
    with pytest.raises(BudgetError, match=r"bytes .*at least [0-9,]+, the smallest.* Ask for memory of 0\.08"):
        small.allocate(None, memory=0.01, schemes=("w8a16", "w4a16"), forms=("narrow",), align=8)


@pytest.mark.parametrize("name", ["w4a16", "fp8", "nvfp4a16"])
def test_a_limit_of_latency_needs_a_profile_of_the_scheme(name: str) -> None:
    config, profile = load_config("smollm2"), gac.Profile.load("nvidia-h100-80gb-hbm3")
    sites = as_planned(family_of(config).sites(config), ["low_rank", "narrow"], fused=False)
    rounded = speed_defaults(gac.Recipe.of(memory=0.5, schemes=(name,)), sites, profile)
    assert (rounded.limits.latency, rounded.slack) == ({}, 0.0)
    plain = speed_defaults(gac.Recipe.of(memory=0.5), sites, profile)
    assert (plain.limits.latency, plain.slack) == ({"prefill:1x1024": 1.0, "decode:1@1024": 1.0}, SLACK)
    with pytest.raises(ProfileError, match=f"prefill:1x1024 with scheme {name}, which the profile does not have"):
        speed_defaults(gac.Recipe.of(memory=0.5, latency=0.9, schemes=("bf16", name)), sites, profile)


def test_what_rounding_needs_is_kept_where_moments_are_too_large_to_be(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then compressing does not calibrate a second time, and rounds to the same numbers."""
    asked: dict[str, Any] = {"memory": 0.5, "schemes": ("bf16", "w8a16", "w4a16:32"), "refit": "none", "align": 8}
    expected = small.compress(small.allocate(None, **asked), copy.deepcopy(small.model))
    monkeypatch.setenv("GAC_HOME", str(tmp_path / "another"))
    monkeypatch.setattr(calibration, "LAYER_BYTES", 0)
    again = small.allocate(None, **asked)
    assert not list((tmp_path / "another").rglob("layer-*"))
    monkeypatch.delattr(LayerwiseBackward, "start")
    quantised, quantise = [], rounding.quantise
    listening = lambda matrix, *known: quantised.append(matrix.shape) or quantise(matrix, *known)  # noqa: E731
    monkeypatch.setattr("gac.schemes.matrices.quantise", listening)
    found = small.compress(again)
    assert {one.scheme for one in again.weights} > {"w8a16"}
    rounded = [one.weight for one in again.weights if one.scheme != "bf16" and one.form == "dense"]
    assert {(weight.out_features, weight.in_features) for weight in rounded} <= {*map(tuple, quantised)}
    assert has_state(found, expected.state_dict())


NAMES = ("w8a16", "w4a16:32", "w3a16", "w2a16", "w8a8", "nvfp4a16", "mxfp4a16")
SIZE = 64


def groups() -> dict[str, Tensor]:
    """Rows of one number each, over an octave; of random ones, of one sign, with an outlier, and of all sizes, from
    those that the smallest scale holds as a few numbers to those that the largest one just reaches."""
    octave, draw = torch.linspace(0.01, 0.02, 257, dtype=torch.float64), torch.Generator().manual_seed(0)
    normal, even = (kind(200, SIZE, dtype=torch.float64, generator=draw) for kind in (torch.randn, torch.rand))
    return {
        "equal": torch.cat([octave, -octave])[:, None].expand(-1, SIZE).contiguous(),
        "random": normal,
        "one sign": even + 1,
        "outlier": normal * torch.where(torch.arange(SIZE) == 7, 50, 1),
        "all sizes": (2 * even - 1) * torch.logspace(-6, 4.8, 200, dtype=torch.float64)[:, None],
    }


GROUPS = groups()


def with_the_nearest_scale(matrix: Tensor, bits: int, zero: bool) -> Tensor:
    """Each row, one group, in the scale nearest to its range over the largest number."""
    most = 2**bits - 1
    low, high = matrix.amin(1, keepdim=True).clamp_max(0), matrix.amax(1, keepdim=True).clamp_min(0)
    high, low = (high, low) if zero else (high.maximum(-low), -high.maximum(-low))
    scale = ((high - low) / (most if zero else most - 1)).bfloat16().half().double()
    scale = torch.where(scale > 0, scale, 2.0**-24)
    middle = (-low / scale).round().clamp(0, most) if zero else torch.full_like(scale, (most + 1) // 2)
    return ((matrix / scale).round() + middle).clamp(0, most).sub(middle) * scale


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_no_group_loses_more_than_with_the_nearest_scale(bits: int, zero: bool, kind: str) -> None:
    matrix = GROUPS[kind]
    scale, zeros = fit_grid(matrix, torch.ones(SIZE, dtype=torch.float64), 2**bits - 1, zero)
    error = ((nearest_numbers(matrix, scale, zeros, 2**bits - 1) - zeros) * scale - matrix).square().sum(1)
    nearest = (with_the_nearest_scale(matrix, bits, zero) - matrix).square().sum(1)
    assert bool((error <= 1.01 * nearest + 1e-30).all())


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_zeros_and_of_the_smallest_numbers(name: str) -> None:
    scheme, matrix = scheme_named(name), torch.zeros(3, SIZE)
    matrix[1] = torch.finfo(torch.float32).tiny / 4  # subnormal
    matrix[2] = torch.linspace(-1e-6, 1e-6, SIZE)
    for inputs in (None, Inputs(correlated(SIZE))):
        values = scheme.quantised(matrix, inputs)
        assert bool(values.isfinite().all())
        assert not values[0].any()
        assert float((values[1:] - matrix[1:]).abs().max()) <= 1e-6


@pytest.mark.parametrize("name", ["w8a16", "w3a16"])
def test_small_weights_keep_their_precision(name: str) -> None:
    """Scales below 2^-14 are subnormal in float16, which holds them all the same."""
    matrix = torch.randn(24, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    large, small = (
        float((scheme_named(name).quantised(part * matrix) / part - matrix).norm()) for part in (1.0, 2.0**-10)
    )
    assert small < 1.2 * large


def test_the_loss_does_not_depend_on_the_size_of_the_inputs() -> None:
    moment, matrix = correlated(SIZE), torch.randn(16, SIZE, dtype=torch.float64)
    large, small = (scheme_named("w3a16").quantised(matrix, Inputs(part * moment)) for part in (1.0, 1e-8))
    assert lost(matrix, small, moment) <= 1.001 * lost(matrix, large, moment)


def test_scales_are_within_what_16_bits_hold() -> None:
    scales = in_16_bits(torch.tensor([0.0, -1.0, 1e-9, 1e-7, 0.3, 6e4, 1e6, 1e30], dtype=torch.float64))
    assert float(scales.min()) == SMALLEST_SCALE
    assert float(scales.max()) == LARGEST_SCALE
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(scales.to(dtype).double(), scales)


@pytest.mark.parametrize("name", ["w4a16", "w2a16:32", "w8a8"])
def test_a_matrix_of_the_largest_numbers_is_quantised_and_one_beyond_is_refused(name: str) -> None:
    scheme = scheme_named(name)
    matrix = torch.randn(8, SIZE, dtype=torch.float64).clamp(-1, 1)
    matrix[0, :2] = torch.tensor([1.0, -1.0], dtype=torch.float64)
    largest = 0.999 * scheme.largest * matrix
    for inputs in (Inputs(correlated(SIZE)), None):
        assert float((scheme.quantised(largest, inputs) - largest).norm()) < 0.8 * float(largest.norm())
        with pytest.raises(ModelError, match=rf"numbers up to .*, in scheme {name}; expected numbers up to"):
            scheme.quantised(1.1 * scheme.largest * matrix, inputs)


def test_such_weights_are_refused_by_name_before_anything_runs(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("calibrated")

    monkeypatch.setattr("gac.measurement.session.calibration_runs", run)
    name = "model.layers.0.mlp.up_proj"
    small.model.get_submodule(name).weight.data[1, 2] = -1e6
    with pytest.raises(ModelError, match=rf"{name} has numbers up to 1e\+06, in scheme w4a16:32"):
        small.allocate(None, memory=0.4, schemes=("bf16", "w8a16", "w4a16:32"))
    with pytest.raises(AssertionError, match="calibrated"):
        small.allocate(0.8)
    small.model.get_input_embeddings().weight.data[3, 3] = 1e7
    with pytest.raises(ModelError, match=r"model.embed_tokens has numbers up to 1e\+07, in scheme w8a16"):
        small.allocate(0.8, head="w8a16")
