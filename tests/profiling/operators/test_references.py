"""What single runners compute, against float64 and against PyTorch's own operators on the CPU."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gac.profiling.operators import OPERATORS, operation, runner_of
from gac.profiling.operators.base import relative_error
from gac.profiling.sweeps.coverage import model_points
from gac.profiling.timing.operands import Pools
from gac.runtime.storage.base import Storage, Tensors
from gac.runtime.storage.modules import STORAGES
from gac.schemes import SCHEMES, Scheme, StorageSpec


def run(name: str, dtype: str = "bf16", **axes: int) -> tuple[Sequence[Any], Sequence[Tensor]]:
    runner, pools = runner_of(name, dtype), Pools("cpu", limit_bytes=2**21)
    checked = operation(name, **axes).axes
    inputs, outputs = runner.operands(checked, dtype, pools.cut), OPERATORS.get(name).outputs(checked, dtype)
    return inputs, runner.run(inputs, list(map(pools.cut_output, outputs)))


def near(actual: Tensor, expected: Tensor) -> bool:
    return float((actual.double() - expected).norm() / expected.norm()) < 1e-2


def test_fp8_is_scaled_as_a_whole_or_by_rows() -> None:
    (x, weight, *scales), result = run("linear", "fp8", m=9, k=32, n=48)
    assert near(result[0], x.double() @ weight.double().T * scales[0].double() * scales[1].double())
    (x, weight, by_row, by_column), result = run("linear_rowwise", "fp8", m=9, k=32, n=48)
    assert near(result[0], (x.double() * by_row) @ (weight.double() * by_column.T).T)


def test_pairs_that_share_their_input_are_pairs() -> None:
    (x, first, *seconds), result = run("low_rank_shared", m=9, k=20, r=5, n=30, pairs=3)
    for part, second, actual in zip(first.split(5), seconds, result, strict=True):
        assert near(actual, x.double() @ part.double().T @ second.double().T)
        assert relative_error(runner_of("low_rank"), [x, part, second], [actual]) < 1e-2


@pytest.mark.parametrize("way", ["separate", "bucketed", "padded"])
def test_every_head_is_multiplied_with_its_own_weight(way) -> None:
    (x, *weights), result = run(f"batched_gemm_{way}", m=9, k=20, heads=5, low=3, high=30)
    heads, actual = chain.from_iterable(weights), chain.from_iterable(result)
    assert all(near(y, head.double() @ w.double().T) for head, w, y in zip(x, heads, actual, strict=True))


def test_both_int4_operators_are_what_pytorchs_int4_kernel_computes() -> None:
    (x, nibbles, scales), _ = run("int4_linear_dequantised", m=5, k=96, n=32, group=32)
    levels = torch.stack([nibbles >> 4, nibbles & 15], dim=-1).flatten(1).int()
    packed = torch._convert_weight_to_int4pack_for_cpu(levels, 2)
    result = [torch._weight_int4pack_mm_for_cpu(x, packed, 32, scales)]
    assert relative_error(runner_of("int4_linear"), [x, nibbles, scales, packed], result) < 1e-2
    assert relative_error(runner_of("int4_linear_dequantised"), [x, nibbles, scales], result) < 1e-2


@pytest.mark.parametrize(
    ("name", "dtype", "axes", "reason"),
    [
        ("int4_linear", "bf16", {"n": 8, "group": 32}, "whole groups only: k = 100, group = 32"),
        ("int4_linear_dequantised", "bf16", {"n": 8, "group": 32}, "whole groups only: k = 100, group = 32"),
        ("linear", "fp8_dynamic", {"n": 16}, "scheme fp8 needs rows and columns that are multiples of 16.*: k = 100"),
    ],
)
def test_a_refused_shape_fails_as_a_failed_launch_does(name, dtype, axes, reason) -> None:
    with pytest.raises(RuntimeError, match=reason):
        run(name, dtype, m=2, k=100, **axes)


GQA: Mapping[str, int] = {"b": 2, "h": 6, "kv": 2, "s": 70, "t": 70, "d": 24}


@pytest.mark.parametrize("name", ["sdpa", "sdpa_flash", "sdpa_math"])
@pytest.mark.parametrize("suffix", ["", "_causal"])
def test_attention_is_pytorchs_in_float64(name, suffix) -> None:
    (q, k, v), result = run(name + suffix, **GQA)
    shared = [tensor.double().repeat_interleave(3, dim=1) for tensor in (k, v)]
    assert near(result[0], scaled_dot_product_attention(q.double(), *shared, is_causal=bool(suffix)))


@pytest.mark.parametrize("lengths", [{"s": 70, "t": 100}, {"s": 100, "t": 70}, {"s": 1, "t": 70}])
def test_the_causal_mask_is_aligned_to_the_top_left(lengths) -> None:
    inputs, result = run("sdpa_math_causal", **{**GQA, **lengths})
    assert relative_error(runner_of("sdpa_math_causal"), inputs, result) < 1e-2
    _, unmasked = run("sdpa_math", **{**GQA, **lengths})
    assert relative_error(runner_of("sdpa_math_causal"), inputs, unmasked) > 0.1


# --- weights in storages ---


@pytest.mark.parametrize("dtype", ["w8a16", "w4a16:64", "w3a16", "w2a16:32"])
def test_weights_in_a_storage_are_multiplied_as_what_they_stand_for(dtype) -> None:
    (x, weight), result = run("linear", dtype, m=9, k=200, n=30)
    assert near(result[0], x.double() @ weight.values(torch.float64).T)
    (x, first, second), result = run("low_rank", dtype, m=9, k=200, r=40, n=30)
    assert near(result[0], x.double() @ first.values(torch.float64).T @ second.values(torch.float64).T)


@pytest.mark.parametrize(("dtype", "far"), [("fp8_dynamic", 0.04), ("w8a8", 0.02)])
def test_inputs_are_rounded_where_the_scheme_rounds_them(dtype, far) -> None:
    (x, weight), result = run("linear", dtype, m=9, k=256, n=64)
    plain = x.double() @ weight.values(torch.float64).T
    error = float((result[0].double() - plain).norm() / plain.norm())
    assert 1e-3 < error < far
    assert relative_error(runner_of("linear", dtype), [x, weight], result) < 5e-3


def test_blocks_of_a_token_lie_side_by_side() -> None:
    (x, weight), result = run("batched_gemm", "w4a16:32", b=3, m=7, k=64, n=20)
    tokens, actual = x.view(7, 3, 64).double(), result[0].view(7, 3, 20)
    assert near(actual, torch.einsum("mbk,bnk->mbn", tokens, weight.values(torch.float64)))


class Halves(Storage):
    """Numbers of 8 bits, halved."""

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"halves": ((rows, columns), torch.int8)}

    def values(self, tensors: Tensors, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return (tensors["halves"].double() / 2).to(dtype)


class Halved(Scheme):
    name = "halved"
    dtype = "halved-timed"
    bits = 8
    storage = StorageSpec("Halves", {})

    def quantised(self, matrix: Tensor, inputs: Any = None, gradients: Any = None) -> Tensor:
        return (2 * matrix).round().clamp(-128, 127) / 2


def test_a_scheme_of_ones_own_is_timed_in_its_own_storage(monkeypatch) -> None:
    monkeypatch.setitem(STORAGES, "Halves", (Halves, ()))
    monkeypatch.setitem(SCHEMES._known, "halved", Halved())
    (x, weight), result = run("linear", "halved-timed", m=9, k=20, n=30)
    assert near(result[0], x.double() @ weight.tensors["halves"].double().T / 2)
    assert {point.dtype for point in model_points("smollm2", schemes=("halved",))} == {"bf16", "halved-timed"}
    assert OPERATORS.get("linear").bytes({"m": 1, "k": 20, "n": 30}, "halved-timed") == 2 * 20 + 20 * 30 + 2 * 30
