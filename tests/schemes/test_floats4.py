"""Weights in 4-bit floating point: their numbers, their scales, and what rounding loses."""

import pytest
import torch
from torch import Tensor

from gac.runtime.plain.modeling_gac import E2M1
from gac.runtime.storage.base import Storage
from gac.schemes import scheme_named
from gac.schemes.base import storage_of
from gac.schemes.feedback.order import Inputs
from gac.schemes.floats4.levels import Float4Levels
from tests.schemes.test_integers import correlated, lost

NAMES = pytest.mark.parametrize("name", ["nvfp4a16", "mxfp4a16"])


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def held(name: str, tensors: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    storage = storage_of(scheme_named(name))
    assert isinstance(storage, Storage)
    return storage.values(tensors, rows, columns, torch.float64)


def test_numbers_are_rounded_as_ieee_754_does_it() -> None:
    every = torch.tensor([*E2M1, *(-number for number in E2M1)], dtype=torch.float64)
    units = torch.linspace(-7, 7, 561, dtype=torch.float64)  # ends, middles and what lies between
    found = Float4Levels(power=True).nearest_(units.clone())
    assert torch.equal((found - units).abs(), (units[:, None] - every).abs().amin(1))
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    assert Float4Levels(power=True).nearest_(middles).tolist() == [0, 1, 1, 2, 2, 4, 4]  # the even one of two


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_on_the_grid_stays(name: str, dtype: torch.dtype) -> None:
    """Scales of 4 bits with NVFP4, powers of two with MXFP4."""
    numbers = torch.tensor(E2M1)[torch.randint(8, (16, 128), generator=torch.Generator().manual_seed(0))]
    for eighths in range(8, 16) if name == "nvfp4a16" else (8,):
        matrix = (numbers * torch.tensor([1, -1]).repeat(64) * eighths * 2.0**-9).to(dtype)
        for inputs in (None, Inputs(correlated(128))):
            assert torch.equal(scheme_named(name).quantised(matrix, inputs), matrix)


@NAMES
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0, 2, 12])
def test_feedback_loses_no_more_and_is_stored_as_it_was_rounded(name: str, seed: int, spread: int) -> None:
    """Also where groups are of all sizes, from those that the smallest scale holds as a few numbers."""
    matrix = normal(24, 128, seed) * torch.logspace(0, -spread, 128, 2, dtype=torch.float64)
    scheme, inputs = scheme_named(name), correlated(128)
    nearest, compensated = (scheme.quantised(matrix, seen) for seen in (None, Inputs(inputs)))
    assert lost(matrix, compensated, inputs) <= lost(matrix, nearest, inputs)
    for seen, rounded in ((None, nearest), (Inputs(inputs), compensated)):
        assert torch.equal(held(name, scheme.stored(matrix, seen), *matrix.shape), rounded)


@NAMES
def test_parts_of_a_matrix_are_cut_from_its_tensors(name: str) -> None:
    storage, tensors = storage_of(scheme_named(name)), scheme_named(name).stored(normal(12, 128))
    assert isinstance(storage, Storage)
    whole = held(name, tensors, 12, 128)
    rows, columns, which = slice(3, 7), slice(32, 96), torch.tensor([5, 0, 5])
    assert torch.equal(held(name, storage.slice_rows(tensors, rows), 4, 128), whole[rows])
    assert torch.equal(held(name, storage.slice_columns(tensors, columns, 128), 12, 64), whole[:, columns])
    assert torch.equal(storage.rows(tensors, which, 12, 128, torch.float64), whole[which])
    assert storage.can_slice_columns(columns, 128)
    assert not storage.can_slice_columns(slice(8, 96), 128)


def test_more_exact_scales_lose_less() -> None:
    matrix = normal(64, 128)
    small, large = (float((scheme_named(name).quantised(matrix) - matrix).norm()) for name in ("nvfp4a16", "mxfp4a16"))
    assert small < 0.9 * large < 0.2 * float(matrix.norm())
