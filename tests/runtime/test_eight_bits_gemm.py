"""GEMMs of 8 bits in Triton: inputs that are rounded, and their products."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from gac.runtime.kernels import int8_fp8 as eight_bits_gemm
from gac.runtime.kernels.quantise_rows import quantise_rows
from gac.runtime.kernels.split_k import Tile
from gac.runtime.storage.eight_bits import READERS, Floats8, Integers8
from gac.runtime.storage.modules import StoredLinear
from gac.schemes import scheme_named
from tests.runtime.interpreted import COMPILER, DEVICE, Hopper, operators, shapes, small_gpu

ROWS = [(1, 64), (7, 576), (40, 1536)]
AMPERE = SimpleNamespace(name="an older GPU", major=8, minor=6)


@pytest.fixture
def running(kernels_anywhere: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU as on a Hopper GPU."""
    small_gpu(monkeypatch)
    if DEVICE == "cpu":  # a GPU has its own properties, which compilers read too
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Hopper)
    with operators(eight_bits_gemm.eight_bits_linear):
        yield


def tokens(rows: int, columns: int) -> Tensor:
    """Random ones, the first with an outlier, the last all zeros."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    x[0, 0] = 30
    if rows > 1:
        x[-1] = 0
    return x.half().to(DEVICE)


@pytest.mark.parametrize(
    ("number", "divisor", "largest"),
    [(torch.int8, 128, 1), (torch.float8_e4m3fn, 512, 0 if DEVICE == "cuda" else None)],
)
@pytest.mark.parametrize(("rows", "columns"), shapes(ROWS, [1]))
def test_numbers_and_scales_are_those_of_plain_pytorch(
    rows: int, columns: int, number: torch.dtype, divisor: int, largest: int | None
) -> None:
    """Triton's interpreter divides less exactly, and loses a carry where it rounds to 8-bit floating point."""
    x = tokens(rows, columns)
    numbers, scale, _ = quantise_rows(x, number)
    expected, expected_scale = READERS[str(number).removeprefix("torch.").partition("_")[0]](x.cpu().float())
    assert numbers.dtype == number
    assert torch.equal(scale.cpu(), expected_scale / divisor)
    if largest is not None:
        off = (numbers.cpu().float() - expected.float() * divisor).abs()
        assert float(off.max()) <= largest
        assert float(off.mean()) < 1e-4


@pytest.mark.parametrize("number", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rows", "columns"), shapes(ROWS, [1]))
@pytest.mark.parametrize("how", [None, Tile(16, 32, 128, 4, 2, programs_per_sm=8)])
def test_products_are_those_of_the_rounded_inputs(
    monkeypatch: pytest.MonkeyPatch, number: torch.dtype, rows: int, columns: int, how: Tile | None
) -> None:
    """Tiles are shared by as many programs as have two steps each, or fewer."""
    small_gpu(monkeypatch)
    generator = torch.Generator().manual_seed(rows)
    weight = (40 * torch.randn(80, columns, generator=generator)).clamp(-127, 127).to(number).to(DEVICE)
    scale = torch.rand(80, 1, generator=generator).half().to(DEVICE)
    x = tokens(rows, columns)
    given = quantise_rows(x, number)
    expected = (given.numbers.double() * given.scale) @ (weight.double() * scale).T / 64
    found = eight_bits_gemm.gemm(given, weight, scale / 64, x.dtype, how)
    assert found.dtype == x.dtype
    assert float((found - expected).norm() / expected.norm()) < 1e-3
    assert not given.counters.any()  # so that another weight can have them


def test_a_gpu_with_less_shared_memory_has_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Hopper)
    cuda, tile = torch.device("cuda"), Tile(16, 64, 128, 4, 4)
    assert [tile.fitted(step, cuda).stages for step in (2**14, 2**15, 2**20)] == [4, 3, 2]


@pytest.mark.usefixtures("running")
def test_a_stored_weight_of_whole_numbers_runs_in_8_bits() -> None:
    scheme = scheme_named("w8a8")
    matrix = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).half()
    held = {name: one.to(DEVICE) for name, one in scheme.stored(matrix).items()}
    stored = StoredLinear(Integers8(), nn.Linear(64, 48).half().to(DEVICE).requires_grad_(False))
    stored.fill(held)
    x = tokens(6, 64).view(2, 3, 64)
    plain = stored.storage.linear(x, stored.storage.values(held, 48, 64, x.dtype), stored.bias)
    with torch.no_grad():
        found = stored(x)
        compiled = torch.compile(stored, backend=COMPILER, fullgraph=True)(x)
    assert found.shape == (2, 3, 48)
    assert torch.equal(found, compiled)
    assert float((found - plain).norm() / plain.norm()) < 2e-3


def test_a_gpu_without_such_a_gemm_and_shapes_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: AMPERE)
    assert "no GEMM multiplies float8_e4m3fn" in str(Floats8().kernel_unsupported_reason(cuda, 64, 64))
    assert Integers8().kernel_unsupported_reason(cuda, 64, 64) is None
    assert Integers8().kernel_unsupported_reason(cuda, 40, 64) == "a weight has 40 rows, no multiple of 16"
    assert Integers8().kernel_unsupported_reason(cuda, 64, 65552) == "a weight has 65552 columns, not 1 to 65536"
