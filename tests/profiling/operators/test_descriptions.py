"""Descriptions of single operators, and operations made from them."""

import re

import pytest

from gac.core.errors import ProfileError
from gac.core.operations import linear
from gac.forms.low_rank import low_rank
from gac.profiling.operators import OPERATORS, operation


def test_operations_are_those_of_the_forms_whatever_the_order_of_their_axes() -> None:
    assert operation("linear", n=7, m=2, k=3) == linear(2, 3, 7)
    assert operation("low_rank", r=5, n=7, m=2, k=3) == low_rank(2, 3, 5, 7)


@pytest.mark.parametrize(
    ("name", "axes", "message"),
    [
        ("linear", {"m": 2, "k": 3}, "the axes m, k, n"),
        ("copy", {"n": 0}, "sizes of at least 1"),
        ("batched_gemm_padded", {"m": 1, "k": 1, "heads": 1, "low": 4, "high": 8}, "at least 2 heads, and low"),
        ("all_gather", {"gpus": 4, "m": 1, "n": 6}, "n that is a multiple of"),
        ("sdpa", {"b": 1, "h": 8, "kv": 3, "s": 1, "t": 1, "d": 8}, "kv that divides h"),
    ],
)
def test_a_wrong_operation_is_an_error(name, axes, message) -> None:
    with pytest.raises(ProfileError, match=f"^{name} with .*; expected {message}"):
        operation(name, **axes)


def test_int4_reads_half_a_byte_a_weight_and_a_scale_and_a_zero_a_group() -> None:
    axes = operation("int4_linear", m=2, k=64, n=8, group=32).axes
    fused = 2 * 64 * 2 + 64 * 8 // 2 + 2 * 8 * 2 * 2 + 2 * 8 * 2
    assert OPERATORS.get("int4_linear").bytes(axes, "bf16") == fused
    assert OPERATORS.get("int4_linear_dequantised").bytes(axes, "bf16") == fused + 2 * 64 * 8


@pytest.mark.parametrize(
    ("way", "weights"),
    [
        ("separate", [(1, 7, 3), (1, 12, 3), (1, 17, 3), (1, 22, 3)]),
        ("bucketed", [(1, 8, 3), (1, 16, 3), (2, 24, 3)]),
        ("padded", [(4, 24, 3)]),
    ],
)
def test_heads_are_bucketed_and_padded_to_multiples_of_8(way, weights) -> None:
    axes = operation(f"batched_gemm_{way}", m=2, k=3, heads=4, low=7, high=22).axes
    inputs = OPERATORS.get(f"batched_gemm_{way}").inputs(axes, "bf16")
    assert [operand.shape for operand in inputs] == [(4, 2, 3), *weights]


INT4 = {"m": 1, "k": 256, "n": 64, "group": 32}
SDPA = {"b": 1, "h": 8, "kv": 8, "s": 64, "t": 64, "d": 64}
LINEAR = {"m": 1, "k": 107, "n": 4096}
HEADS = {"b": 2, "m": 1, "k": 64, "n": 64}
MULTIPLE_OF_8, WHOLE = "takes heads that are a multiple of 8 only: d = 107", "whole groups only: k = 240, group = 32"
EIGHT_BITS = "needs rows and columns that are multiples of 16, and no batched GEMM"


@pytest.mark.parametrize(
    ("name", "dtype", "axes", "reason"),
    [
        ("linear", "fp8", LINEAR, "torch._scaled_mm takes k and n that are multiples of 16 only .*: k = 107$"),
        ("int4_linear", "bf16", INT4 | {"group": 16}, "takes groups of 32, 64, 128 or 256 only: group = 16"),
        ("int4_linear", "bf16", INT4 | {"k": 240}, WHOLE),
        ("int4_linear", "bf16", INT4 | {"n": 62}, "takes n that is a multiple of 8 only .*: n = 62"),
        ("sdpa_flash", "bf16", SDPA | {"d": 264}, "FlashAttention takes heads up to 256 only: d = 264"),
        ("sdpa_flash_causal", "bf16", SDPA | {"t": 96}, "takes the causal mask on s = t only: s = 64, t = 96"),
        ("sdpa_efficient", "bf16", SDPA | {"d": 107}, f"memory-efficient attention {MULTIPLE_OF_8}"),
        ("sdpa_efficient", "bf16", SDPA | {"kv": 2}, "as many heads of K and V as of Q only .*: h = 8, kv = 2"),
        ("sdpa_cudnn", "bf16", SDPA | {"d": 107}, f"cuDNN attention {MULTIPLE_OF_8}"),
        ("sdpa_cudnn", "bf16", SDPA | {"t": 1}, "cuDNN attention takes more than one key only: t = 1"),
        ("linear", "fp8_dynamic", LINEAR, f"scheme fp8 {EIGHT_BITS}: k = 107, n = 4096"),
        ("low_rank", "w8a8", {"m": 1, "k": 64, "r": 24, "n": 64}, f"scheme w8a8 {EIGHT_BITS}: k = 64, n = 24"),
        ("batched_gemm", "w8a8", HEADS, f"scheme w8a8 {EIGHT_BITS}: b = 2, k = 64, n = 64"),
        ("int4_linear_dequantised", "bf16", {"m": 1, "k": 240, "n": 62, "group": 16}, None),
        ("sdpa", "bf16", SDPA | {"d": 107, "kv": 2}, None),
        ("batched_gemm", "w4a16:64", HEADS | {"k": 65, "n": 3}, None),
    ],
)
def test_shapes_are_refused_by_rules_of_their_own(name, dtype, axes, reason) -> None:
    refusal = OPERATORS.get(name).refusal(axes, dtype)
    assert refusal is None if reason is None else re.search(reason, refusal)


def test_operators_of_forms_take_the_schemes_that_have_a_storage_and_no_others_do() -> None:
    takes = [name for name in OPERATORS.names if OPERATORS.get(name).takes("w4a16:32")]
    assert takes == ["linear", "low_rank", "batched_gemm"]
    linear = OPERATORS.get("linear")
    assert [linear.takes(dtype) for dtype in ("bf16", "fp8", "fp8_dynamic", "int8", "w99a16")] == [1, 1, 1, 0, 0]
