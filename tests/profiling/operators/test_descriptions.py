"""Descriptions of single operators, and operations made from them."""

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
        ("linear", {"m": 2, "k": 3}, "linear with m=2, k=3; expected the axes m, k, n"),
        ("copy", {"n": 0}, "copy with n=0; expected sizes of at least 1"),
        (
            "batched_gemm_padded",
            {"m": 1, "k": 1, "heads": 1, "low": 4, "high": 8},
            "expected at least 2 heads, and low",
        ),
        ("all_gather", {"gpus": 4, "m": 1, "n": 6}, "expected n that is a multiple of"),
        ("sdpa", {"b": 1, "h": 8, "kv": 3, "s": 1, "t": 1, "d": 8}, "expected kv that divides h"),
    ],
)
def test_a_wrong_operation_is_an_error(name, axes, message) -> None:
    with pytest.raises(ProfileError, match=message):
        operation(name, **axes)


def test_int4_reads_half_a_byte_a_weight_and_a_scale_and_a_zero_a_group() -> None:
    axes = operation("int4_linear", m=2, k=64, n=8, group=32).axes
    fused = 2 * 64 * 2 + 64 * 8 // 2 + 2 * 8 * 2 * 2 + 2 * 8 * 2
    assert OPERATORS.get("int4_linear").bytes(axes, "bf16") == fused
    assert OPERATORS.get("int4_linear_dequantised").bytes(axes, "bf16") == fused + 2 * 64 * 8


def test_heads_of_different_dims_are_bucketed_and_padded_to_multiples_of_8() -> None:
    axes = operation("batched_gemm_bucketed", m=2, k=3, heads=4, low=7, high=22).axes
    shapes = {
        name: [operand.shape for operand in OPERATORS.get(f"batched_gemm_{name}").inputs(axes, "bf16")]
        for name in ("separate", "bucketed", "padded")
    }
    assert shapes["separate"] == [(4, 2, 3), (1, 7, 3), (1, 12, 3), (1, 17, 3), (1, 22, 3)]
    assert shapes["bucketed"] == [(4, 2, 3), (1, 8, 3), (1, 16, 3), (2, 24, 3)]
    assert shapes["padded"] == [(4, 2, 3), (4, 24, 3)]


FP8 = "torch._scaled_mm takes k and n that are multiples of 16 only (16-byte rows of fp8)"
FUSED, GROUPS = "torch._weight_int4pack_mm takes", "k is cut into whole bytes and whole groups only"
INT4 = {"m": 1, "k": 256, "n": 64, "group": 32}
EFFICIENT = "memory-efficient attention takes as many heads of K and V as of Q only (PyTorch 2.6 to 2.11)"
SDPA = {"b": 1, "h": 8, "kv": 8, "s": 64, "t": 64, "d": 64}


@pytest.mark.parametrize(
    ("name", "dtype", "axes", "reason"),
    [
        ("linear", "fp8", {"m": 1, "k": 107, "n": 4096}, f"{FP8}: k = 107"),
        ("int4_linear", "bf16", INT4 | {"group": 16}, f"{FUSED} groups of 32, 64, 128 or 256 only: group = 16"),
        ("int4_linear", "bf16", INT4 | {"k": 240}, f"{GROUPS}: k = 240, group = 32"),
        ("int4_linear", "bf16", INT4 | {"n": 62}, f"{FUSED} n that is a multiple of 8 only (its tile): n = 62"),
        ("int4_linear_dequantised", "bf16", {"m": 1, "k": 240, "n": 62, "group": 16}, None),
    ],
)
def test_gemms_are_refused_by_their_own_rules(name, dtype, axes, reason) -> None:
    assert OPERATORS.get(name).refusal(axes, dtype) == reason


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("sdpa_flash", {"d": 264}, "FlashAttention takes heads up to 256 only: d = 264"),
        ("sdpa_flash_causal", {"t": 96}, "FlashAttention takes the causal mask on s = t only: s = 64, t = 96"),
        ("sdpa_efficient", {"d": 107}, "memory-efficient attention takes heads that are a multiple of 8 only: d = 107"),
        ("sdpa_efficient", {"kv": 2}, f"{EFFICIENT}: h = 8, kv = 2"),
        ("sdpa_cudnn", {"d": 107}, "cuDNN attention takes heads that are a multiple of 8 only: d = 107"),
        ("sdpa_cudnn", {"t": 1}, "cuDNN attention takes more than one key only: t = 1"),
        ("sdpa", {"d": 107, "kv": 2}, None),
    ],
)
def test_attention_backends_refuse_by_their_own_rules(name, change, reason) -> None:
    assert OPERATORS.get(name).refusal(SDPA | change, "bf16") == reason


# --- weights in storages ---

EIGHT_BITS = "needs rows and columns that are multiples of 16, and no batched GEMM"


@pytest.mark.parametrize(
    ("name", "dtype", "axes", "reason"),
    [
        ("linear", "fp8_dynamic", {"m": 1, "k": 107, "n": 4096}, f"scheme fp8 {EIGHT_BITS}: k = 107, n = 4096"),
        ("low_rank", "w8a8", {"m": 1, "k": 64, "r": 24, "n": 64}, f"scheme w8a8 {EIGHT_BITS}: k = 64, n = 24"),
        (
            "batched_gemm",
            "w8a8",
            {"b": 2, "m": 1, "k": 64, "n": 64},
            f"scheme w8a8 {EIGHT_BITS}: b = 2, k = 64, n = 64",
        ),
        ("batched_gemm", "w4a16:64", {"b": 2, "m": 1, "k": 65, "n": 3}, None),
    ],
)
def test_schemes_refuse_by_what_they_need(name, dtype, axes, reason) -> None:
    assert OPERATORS.get(name).refusal(axes, dtype) == reason


def test_operators_of_forms_take_the_schemes_that_have_a_storage_and_no_others_do() -> None:
    takes = [name for name in OPERATORS.names if OPERATORS.get(name).takes("w4a16:32")]
    assert takes == ["linear", "low_rank", "batched_gemm"]
    linear = OPERATORS.get("linear")
    assert [linear.takes(dtype) for dtype in ("bf16", "fp8", "fp8_dynamic", "int8", "w99a16")] == [1, 1, 1, 0, 0]
