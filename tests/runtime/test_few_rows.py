"""GEMMs with few rows: products of each kernel beside those in float64."""

import pytest
import torch
from torch import Tensor

from gac.runtime.kernels import few_rows
from tests.runtime.interpreted import DEVICE, Hopper, shapes, small_gpu

SHAPES = [(1, 70, 1096), (1, 5, 2048), (7, 130, 2056), (16, 64, 512), (24, 100, 2048), (64, 70, 8192), (64, 5000, 512)]


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run wherever tensors are: on a CPU as on a Hopper GPU."""
    if DEVICE == "cpu":
        monkeypatch.setattr(few_rows, "kernels_run", lambda x, weight: len(x) <= few_rows.FEW_ROWS)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Hopper)
        small_gpu(monkeypatch)


def operands(rows: int, n: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns + 8, generator=draw).to(DEVICE, torch.float16)[:, 8:]
    weight = torch.randn(n, columns, generator=draw).to(DEVICE, torch.float16) / columns**0.5
    return x, weight, torch.randn(n, generator=draw).to(DEVICE, torch.float16)


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "n", "columns"), shapes(SHAPES, [0, 2, 4, 6]))
def test_products_are_those_of_a_gemm(rows: int, n: int, columns: int, with_bias: bool) -> None:
    x, weight, bias = operands(rows, n, columns)
    buffer = torch.full((rows, n + 8), torch.nan, device=DEVICE, dtype=torch.float16)
    for _ in range(2):  # counters of the first launch are zeros again
        few_rows.multiply(x, weight, buffer[:, 8:], bias if with_bias else None)
    assert error(buffer[:, 8:], x.double() @ weight.double().t() + with_bias * bias.double()) < 4e-3
    assert buffer[:, :8].isnan().all()


@pytest.mark.parametrize(("n", "columns"), [(77, 1096), (4, 2048)])
def test_gate_and_up_are_activated_in_one_launch(n: int, columns: int) -> None:
    x, weight, _ = operands(1, 2 * n, columns)
    out = torch.full((1, n), torch.nan, device=DEVICE, dtype=torch.float16)
    few_rows.gated_row(x, weight, out)
    gate, up = (x.double() @ weight.double().t()).chunk(2, 1)
    assert error(out, torch.nn.functional.silu(gate) * up) < 6e-3


@pytest.mark.parametrize(
    ("rows", "n", "columns", "kernel"),
    [(2, 4096, 512, True), (16, 6144, 4096, False), (64, 4096, 4096, False), (64, 4096, 14336, True)],
)
def test_cublas_multiplies_what_it_is_faster_at(rows: int, n: int, columns: int, kernel: bool) -> None:
    assert (few_rows.tile_of(rows, n, columns) is not None) == kernel


def test_nothing_past_the_ends_of_rows_is_read() -> None:
    apart = torch.full((64, 180), torch.nan, dtype=torch.bfloat16)
    apart[:, :80] = torch.randn(64, 80)
    weight, out = torch.randn(32, 80, dtype=torch.bfloat16), torch.empty(64, 32, dtype=torch.bfloat16)
    few_rows.multiply(apart[:, :80], weight, out)
    assert error(out, apart[:, :80].double() @ weight.double().t()) < 4e-3
