"""Pairs that run one row in Triton kernels: where they do, what these compute, and that elsewhere they are pairs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gac import one_row
from gac.compression import layers
from gac.compression.layers import LowRankLinear, TritonLowRankLinear, empty_module
from gac.plan import WeightChoice

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels need a GPU")


def pair(k: int, r: int, n: int, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> TritonLowRankLinear:
    torch.manual_seed(0)
    made = TritonLowRankLinear(k, r, n, bias, dtype=dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.requires_grad_(False)


def exact(made: LowRankLinear, x: Tensor) -> Tensor:
    """The same in float64."""
    product = x.double() @ made.first.weight.double().T @ made.second.weight.double().T
    return product if made.second.bias is None else product + made.second.bias.double()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


class Launches:
    """Stands for the kernels, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self, x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None, hidden: Tensor, out: Tensor
    ) -> None:
        self.count += 1
        hidden.copy_(first @ x.flatten())
        y = second @ hidden
        out.copy_((y if bias is None else y + bias).view_as(out))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The kernels take whatever has one row."""
    stand_in = Launches()
    monkeypatch.setattr(one_row, "launch", stand_in)
    monkeypatch.setattr(layers, "takes", lambda x: x.numel() == x.shape[-1])
    return stand_in


def like(rows: int = 1, is_cuda: bool = True, dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, rows, 64), numel=lambda: rows * 64)


def test_one_row_in_16_bit_on_a_gpu_with_triton_and_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_row, "HAS_TRITON", True)
    with torch.no_grad():
        assert one_row.takes(like())
        assert one_row.takes(like(dtype=torch.float16))
        assert not one_row.takes(like(rows=2))
        assert not one_row.takes(like(is_cuda=False))
        assert not one_row.takes(like(dtype=torch.float32))
        monkeypatch.setattr(one_row, "HAS_TRITON", False)
        assert not one_row.takes(like())
    monkeypatch.setattr(one_row, "HAS_TRITON", True)
    assert not one_row.takes(like())


@pytest.mark.parametrize(
    ("count", "features"), [(40, 1), (263, 1), (264, 2), (1024, 4), (2048, 8), (2112, 16), (9000, 16)]
)
def test_the_first_weight_is_shared_out_to_as_many_programs_as_there_are_sms(count: int, features: int) -> None:
    assert one_row._features(count, 132) == features


def test_the_form_is_built_as_such_a_pair() -> None:
    module = empty_module(WeightChoice("q", "low_rank:triton", 16, 24, 40, None), True, "meta", torch.float32)
    assert type(module) is TritonLowRankLinear
    assert [*module.state_dict()] == ["first.weight", "second.weight", "second.bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_on_a_cpu_it_is_a_pair_like_any_other(rows: int, dtype: torch.dtype) -> None:
    made, plain = pair(40, 16, 24, dtype=dtype), LowRankLinear(40, 16, 24, dtype=dtype)
    plain.load_state_dict(made.state_dict())
    x = torch.randn(1, rows, 40, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(made(x), plain(x))


@pytest.mark.parametrize("bias", [False, True])
def test_one_row_goes_to_the_kernels_and_more_rows_do_not(bias: bool, launches: Launches) -> None:
    made = pair(40, 16, 24, bias)
    for shape, launched in (((1, 1, 40), 1), ((40,), 2), ((1, 3, 40), 2)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        assert made(x).shape == (*shape[:-1], 24)
        assert error(made(x), exact(made, x)) < 1e-2
        assert launches.count == 2 * launched
    assert launches.count == 4


def test_a_factor_that_something_stands_in_for_is_called(launches: Launches) -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    made = pair(40, 16, 24, bias=False)
    adapted = Adapted(40, 16, bias=False, dtype=torch.bfloat16)
    adapted.load_state_dict(made.first.state_dict())
    made.first, x = adapted.requires_grad_(False), torch.randn(1, 40, dtype=torch.bfloat16)
    assert error(made(x), 2 * exact(made, x)) < 1e-2
    assert launches.count == 0


def test_weights_in_another_dtype_are_left_to_pytorch(launches: Launches) -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        pair(40, 16, 24, dtype=torch.float16)(torch.randn(1, 40, dtype=torch.bfloat16))
    assert launches.count == 0


def test_compiled_it_is_one_graph(launches: Launches) -> None:
    made, x = pair(40, 16, 24), torch.randn(1, 1, 40, dtype=torch.bfloat16)
    with torch.no_grad():
        found = torch.compile(made, backend="aot_eager", fullgraph=True)(x)
    assert launches.count == 1
    assert error(found, exact(made, x)) < 1e-2


def test_without_triton_the_kernels_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_row, "HAS_TRITON", False)
    one_row._kernel.cache_clear()
    with pytest.raises(RuntimeError, match=r"^Triton is not installed$"):
        one_row._kernel()


@on_gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "r", "n"), [(4096, 1024, 4096), (14336, 2048, 4096), (576, 96, 1536), (100, 23, 35)])
def test_the_kernels_compute_what_float64_does(k: int, r: int, n: int, dtype: torch.dtype, bias: bool) -> None:
    made = pair(k, r, n, bias, dtype).cuda()
    x = torch.randn(1, 1, k, dtype=dtype, device="cuda")
    with torch.no_grad():
        assert one_row.takes(x)
        found = made(x)
    assert error(found, exact(made, x)) < 5e-3
    assert torch.equal(found, one_row.one_row_pair(x, made.first.weight, made.second.weight, made.second.bias))


@on_gpu
def test_the_kernels_can_be_captured_in_a_cuda_graph() -> None:
    made, x = pair(512, 64, 256).cuda(), torch.randn(1, 512, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            made(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = made(x)
        x.neg_()
        graph.replay()
        assert torch.equal(found, made(x))


@on_gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_kernels_run_in_a_compiled_model(mode: str) -> None:
    made, x = pair(512, 64, 256).cuda(), torch.randn(1, 512, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        compiled = torch.compile(made, mode=mode, fullgraph=True)
        for _ in range(3):
            assert torch.equal(compiled(x).clone(), made(x))
