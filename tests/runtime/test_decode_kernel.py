"""Linear weights that multiply one row in Triton: where they do, what that computes, what elsewhere stays the same."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from gac.runtime import decode_kernel
from gac.runtime.decode_kernel import DecodeLinear, use_decode_kernel
from gac.runtime.modules import LowRankLinear, ValueLinear
from gac.runtime.shared_gemm import FusedInput
from tests.compression.applying import logits

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels need a GPU")


def weight(k: int, n: int, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> DecodeLinear:
    torch.manual_seed(0)
    made = DecodeLinear(k, n, bias, dtype=dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.requires_grad_(False)


def exact(made: nn.Linear, x: Tensor) -> Tensor:
    """The same in float64."""
    product = x.double() @ made.weight.double().T
    return product if made.bias is None else product + made.bias.double()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


class Launches:
    """Stands for the operator, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.count += 1
        y = x @ weight.T
        return y.clone() if bias is None else y + bias


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The kernel takes whatever has one row, and as if it were captured."""
    stand_in = Launches()
    operator = library.custom_op("gac_tests::decode_linear", stand_in, mutates_args=(), schema=decode_kernel._SCHEMA)
    operator.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)))
    monkeypatch.setattr(decode_kernel, "_operator", lambda: torch.ops.gac_tests.decode_linear)
    monkeypatch.setattr(decode_kernel, "_is_one_row", lambda x: x.numel() == x.shape[-1])
    monkeypatch.setattr(decode_kernel, "_is_worthwhile", lambda x, weight, bias: True)
    return stand_in


def like(rows: int = 1, is_cuda: bool = True, dtype: torch.dtype = torch.bfloat16) -> Any:
    device = torch.device("cuda" if is_cuda else "cpu")
    return SimpleNamespace(is_cuda=is_cuda, device=device, dtype=dtype, shape=(1, rows, 64), numel=lambda: rows * 64)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights lie on the GPU, wherever they are."""
    monkeypatch.setattr(decode_kernel, "HAS_TRITON", True)
    monkeypatch.setattr(decode_kernel, "_beside", lambda x, values: type(values) in (nn.Parameter, Tensor))


@pytest.mark.usefixtures("beside")
def test_one_row_in_16_bit_on_a_gpu_with_triton_and_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made = weight(64, 8)
    with torch.no_grad():
        assert decode_kernel.takes(like(), made.weight, made.bias)
        assert decode_kernel.takes(like(dtype=torch.float16), made.weight, None)
        assert not decode_kernel.takes(like(rows=2), made.weight, None)
        assert not decode_kernel.takes(like(is_cuda=False), made.weight, None)
        assert not decode_kernel.takes(like(dtype=torch.float32), made.weight, None)
        monkeypatch.setattr(decode_kernel, "HAS_TRITON", False)
        assert not decode_kernel.takes(like(), made.weight, None)
    monkeypatch.setattr(decode_kernel, "HAS_TRITON", True)
    assert not decode_kernel.takes(like(), made.weight, made.bias)


def test_a_weight_is_plain_and_lies_beside_the_row() -> None:
    class Quantised(nn.Parameter):
        pass

    x, values = torch.randn(1, 64), torch.randn(8, 64)
    assert decode_kernel._beside(x, values)
    assert decode_kernel._beside(x, nn.Parameter(values))
    assert not decode_kernel._beside(x, Quantised(values))
    assert not decode_kernel._beside(x, values.half())
    assert not decode_kernel._beside(x, values.to("meta"))
    assert not decode_kernel._beside(x, values.T)


def test_it_is_launched_the_first_time_and_then_in_graphs_and_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was never run cannot be loaded while a graph is captured."""
    monkeypatch.setattr(decode_kernel, "_run_before", set())
    monkeypatch.setattr(decode_kernel, "prepare", lambda: None)
    monkeypatch.setattr(decode_kernel, "takes", lambda x, weight, bias: x.requires_grad is False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, made, other = torch.randn(1, 64), weight(64, 8), weight(64, 16)
    assert not decode_kernel._is_worthwhile(x.clone().requires_grad_(), made.weight, None)
    assert [decode_kernel._is_worthwhile(x, made.weight, None) for _ in range(3)] == [True, False, False]
    assert decode_kernel._is_worthwhile(x, made.weight, made.bias)
    assert decode_kernel._is_worthwhile(x, other.weight, None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert decode_kernel._is_worthwhile(x, made.weight, None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert decode_kernel._is_worthwhile(x, made.weight, None)


@pytest.mark.parametrize(
    ("count", "size", "features"),
    [
        *((40, 4096, 1), (263, 4096, 1), (264, 4096, 2), (1024, 4096, 4), (2048, 14336, 8), (9000, 4096, 16)),
        *((1024, 1024, 4), (1024, 512, 8), (1024, 256, 16), (4096, 16, 16), (4096, 1, 16)),
    ],
)
def test_a_weight_is_shared_out_to_as_many_programs_as_there_are_sms(count: int, size: int, features: int) -> None:
    assert decode_kernel._features(count, size, 132) == features


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_on_a_cpu_it_is_a_weight_like_any_other(rows: int, dtype: torch.dtype) -> None:
    made, x = weight(40, 24, dtype=dtype), torch.randn(1, rows, 40, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(made(x), functional.linear(x, made.weight, made.bias))


@pytest.mark.parametrize("bias", [False, True])
def test_one_row_goes_to_the_kernel_and_more_rows_do_not(bias: bool, launches: Launches) -> None:
    made = weight(40, 24, bias)
    for shape, launched in (((1, 1, 40), 1), ((40,), 2), ((1, 3, 40), 2)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        found = made(x)
        assert found.shape == (*shape[:-1], 24)
        assert error(found, exact(made, x)) < 1e-2
        assert launches.count == launched


def test_every_weight_but_the_head_does(tiny_model: LlamaForCausalLM, launches: Launches) -> None:
    attention, mlp = tiny_model.model.layers[0].self_attn, tiny_model.model.layers[0].mlp
    attention.q_proj = LowRankLinear(64, 16, 64, False)
    attention.v_proj = ValueLinear(64, 2, 16, False)
    for parameter in (*attention.q_proj.parameters(), *attention.v_proj.parameters()):
        nn.init.normal_(parameter, std=0.02)
    quantised = tiny_model.model.layers[1].mlp.up_proj
    quantised.__class__ = type("Quantised", (nn.Linear,), {})
    fused = FusedInput([mlp.gate_proj, mlp.up_proj])
    mlp.gate_proj.fused = fused
    with torch.no_grad():
        names, before = [*tiny_model.state_dict()], logits(tiny_model)
        use_decode_kernel(tiny_model)
        assert type(tiny_model.lm_head) is nn.Linear
        assert type(quantised).__name__ == "Quantised"
        assert type(mlp.down_proj) is DecodeLinear
        assert [*tiny_model.state_dict()] == names
        assert torch.equal(logits(tiny_model), before)
        assert launches.count == 0
        x = torch.randn(1, 1, 64, dtype=torch.bfloat16)
        tiny_model.bfloat16()
        for made, launched in ((attention.q_proj, 2), (attention.v_proj, 1), (mlp.up_proj, 1)):
            launches.count = 0
            assert made(x) is not None
            assert launches.count == launched
        launches.count = 0
        assert fused.of(0, x).shape == (1, 1, 176)
        assert launches.count == 1


def test_compiled_it_is_one_graph(launches: Launches) -> None:
    made, x = weight(40, 24), torch.randn(1, 1, 40, dtype=torch.bfloat16)
    with torch.no_grad():
        found = torch.compile(made, backend="aot_eager", fullgraph=True)(x)
    assert launches.count == 1
    assert error(found, exact(made, x)) < 1e-2


def test_without_triton_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernel, "HAS_TRITON", False)
    decode_kernel._kernel.cache_clear()
    with pytest.raises(RuntimeError, match=r"^Triton is not installed$"):
        decode_kernel._kernel()


@on_gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "n"), [(4096, 1024), (14336, 4096), (1024, 14336), (96, 1536), (4096, 28672), (23, 35)])
def test_the_kernel_computes_what_float64_does(k: int, n: int, dtype: torch.dtype, bias: bool) -> None:
    made = weight(k, n, bias, dtype).cuda()
    x = torch.randn(1, 1, k, dtype=dtype, device="cuda")
    decode_kernel.prepare()
    with torch.no_grad():
        assert decode_kernel.takes(x, made.weight, made.bias)
        found = torch.ops.gac.decode_linear(x, made.weight, made.bias)
    assert error(found, exact(made, x)) < 5e-3


@on_gpu
def test_it_is_captured_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_kernel.prepare()
    made, x = weight(512, 256).cuda(), torch.randn(1, 512, dtype=torch.bfloat16, device="cuda")
    counted: list[Tensor] = []
    launch = decode_kernel.launch
    monkeypatch.setattr(decode_kernel, "launch", lambda *given: (counted.append(given[0]), launch(*given)))
    with torch.no_grad():
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            made(x)
            made(x)
        assert len(counted) == 1
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = made(x)
        assert len(counted) == 2
        x.neg_()
        graph.replay()
        assert torch.equal(found, torch.ops.gac.decode_linear(x, made.weight, made.bias))


@on_gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_it_runs_in_a_compiled_model(mode: str, bias: bool) -> None:
    decode_kernel.prepare()
    made, x = weight(512, 256, bias).cuda(), torch.randn(1, 512, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        compiled = torch.compile(made, mode=mode, fullgraph=True)
        for _ in range(3):
            assert torch.equal(compiled(x).clone(), torch.ops.gac.decode_linear(x, made.weight, made.bias))
