"""Scales of integer schemes: the nearest that 16 bits hold, from the smallest to the largest weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import gac
from gac.core.errors import ModelError
from gac.schemes import scheme_named
from gac.schemes.base import LARGEST_SCALE
from gac.schemes.inputs import Inputs
from gac.schemes.integers.grids import SMALLEST_SCALE, fit_grid, in_16_bits, nearest_numbers
from tests.schemes.test_integers import correlated, lost

SCHEMES = ("w8a16", "w4a16:32", "w3a16", "w2a16", "w8a8")
SIZE = 64


def equal_numbers() -> Tensor:
    """Rows of one number each, over an octave, positive and negative."""
    values = torch.linspace(0.01, 0.02, 257, dtype=torch.float64)
    return torch.cat([values, -values])[:, None].expand(-1, SIZE).contiguous()


def with_an_outlier() -> Tensor:
    torch.manual_seed(0)
    matrix = torch.randn(200, SIZE, dtype=torch.float64)
    matrix[:, 7] *= 50
    return matrix


def of_all_sizes() -> Tensor:
    """Rows from those that the smallest scale holds as a few numbers to those that the largest one just reaches."""
    torch.manual_seed(0)
    numbers = torch.rand(200, SIZE, dtype=torch.float64) * 2 - 1
    return numbers * torch.logspace(-6, 4.8, 200, dtype=torch.float64)[:, None]


GROUPS = {
    "equal": equal_numbers(),
    "random": torch.randn(200, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "one sign": torch.rand(200, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1,
    "outlier": with_an_outlier(),
    "all sizes": of_all_sizes(),
}


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


@pytest.mark.parametrize("name", SCHEMES)
def test_known_inputs_lose_no_more(name: str) -> None:
    scheme, moment = scheme_named(name), correlated(SIZE)
    for matrix in (GROUPS["random"][:16], GROUPS["one sign"][:16], GROUPS["equal"][::16]):
        plain, informed = scheme.quantised(matrix), scheme.quantised(matrix, Inputs(moment))
        assert lost(matrix, informed, moment) <= 1.01 * lost(matrix, plain, moment) + 1e-30


@pytest.mark.parametrize("name", SCHEMES)
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


# --- weights beyond a scheme's range --------------------------------------------------------------------------------


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


def test_such_weights_are_refused_by_name_before_anything_runs(
    tiny_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("calibrated")

    monkeypatch.setattr("gac.measurement.session.calibration_run", run)
    name = "model.layers.0.mlp.up_proj"
    tiny_model.get_submodule(name).weight.data[1, 2] = -1e6
    options = {"calibration": f"{text_file}:4x32", "profile": "nvidia-h100-80gb-hbm3", "tokenizer": tiny_tokenizer}
    with pytest.raises(ModelError, match=rf"{name} has numbers up to 1e\+06, in scheme w4a16:32"):
        gac.allocate(tiny_model, memory=0.4, schemes=("bf16", "w8a16", "w4a16:32"), **options)
    with pytest.raises(AssertionError, match="calibrated"):
        gac.allocate(tiny_model, 0.8, **options)
    tiny_model.get_input_embeddings().weight.data[3, 3] = 1e7
    with pytest.raises(ModelError, match=r"model.embed_tokens has numbers up to 1e\+07, in scheme w8a16"):
        gac.allocate(tiny_model, 0.8, head="w8a16", **options)
