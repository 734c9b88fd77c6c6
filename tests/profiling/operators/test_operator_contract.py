"""What the description of every operator must keep to."""

from collections.abc import Callable, Mapping
from itertools import product

import pytest

from gac.profiling.operators import ITEM_BYTES, OPERATORS, Operand, Operator, operation
from tests.profiling.examples import COLLECTIVES, EXAMPLES, ROUNDINGS, SCHEMES, schemes_of


def pair(m: int, k: int, r: int, n: int) -> int:
    return m * k * r + m * r * n


def attention(causal: bool) -> Callable[..., int]:
    def count(b: int, h: int, kv: int, s: int, t: int, d: int) -> int:
        seen = sum(1 for query, key in product(range(s), range(t)) if key <= query or not causal)
        return 2 * b * h * seen * d  # q @ k.T, and the weights @ v

    return count


def latent_attention(b: int, h: int, kv: int, t: int, d: int, g: int, k: int, v: int) -> int:
    keys, scores, mixed = t * kv * k * d, t * h * d, t * h * v
    return b * (keys + scores + mixed + h * v * d)


def heads(m: int, k: int, heads: int, low: int, high: int) -> int:
    assert (heads, low, high) == (4, 67, 90)
    return m * k * (67 + 74 + 82 + 90)


COUNTS: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(("linear", "linear_rowwise"), lambda m, k, n: m * k * n),
    "low_rank": pair,
    "low_rank_shared": lambda m, k, r, n, pairs: pairs * pair(m, k, r, n),
    "batched_gemm": lambda b, m, k, n: b * m * k * n,
    **{f"batched_gemm_{way}": heads for way in ("separate", "bucketed", "padded")},
    **dict.fromkeys(("int4_linear", "int4_linear_dequantised"), lambda m, k, n, group: m * k * n),
    **{name: attention(name.endswith("_causal")) for name in OPERATORS.names if name.startswith("sdpa")},
    **{name: latent_attention for name in OPERATORS.names if name.startswith("latent_attention")},
    **dict.fromkeys(("copy", *ROUNDINGS, *COLLECTIVES), lambda **_axes: 0),
}


@pytest.fixture(params=list(OPERATORS), ids=list(OPERATORS.names))
def operator(request) -> Operator:
    return request.param


@pytest.fixture
def axes(operator) -> Mapping[str, int]:
    return EXAMPLES[operator.name]


def operands(operator: Operator, axes: Mapping[str, int], dtype: str) -> tuple[Operand, ...]:
    return *operator.inputs(axes, dtype), *operator.outputs(axes, dtype)


def test_every_operator_has_an_example() -> None:
    assert set(EXAMPLES) == set(COUNTS) == set(OPERATORS.names)


def test_its_example_is_an_operation_of_it(operator, axes) -> None:
    assert operation(operator.name, **axes).shape == tuple((name, axes[name]) for name in operator.axes)


def test_its_operands_are_of_known_dtypes_and_of_sizes_from_1_and_its_results_too(operator, axes) -> None:
    assert operator.stored == bool(schemes_of(operator))
    for dtype in schemes_of(operator):
        assert {one.dtype for one in (operator.inputs(axes, dtype)[0], *operator.outputs(axes, dtype))} == {"bf16"}
        assert {one.dtype for one in operator.inputs(axes, dtype)[1:]} == {dtype}
    for dtype in operator.dtypes:
        assert operator.inputs(axes, dtype)[0].dtype == dtype
        for operand in operands(operator, axes, dtype):
            assert operand.dtype in ITEM_BYTES
            assert min(operand.shape) >= 1
        floating = {"bf16", "fp16"} | ({"fp8", "int8", "fp32"} if operator.name in ROUNDINGS else set())
        assert {operand.dtype for operand in operator.outputs(axes, dtype)} <= floating


def test_its_flops_are_two_a_multiplication(operator, axes) -> None:
    assert operator.flops(axes) == 2 * COUNTS[operator.name](**axes)


def test_its_bytes_are_those_of_its_operands(operator, axes) -> None:
    for dtype in (*operator.dtypes, *schemes_of(operator)):
        moved = sum(operand.bytes for operand in operands(operator, axes, dtype))
        if operator.name in ("batched_gemm_bucketed", "batched_gemm_padded"):
            assert operator.bytes(axes, dtype) == OPERATORS.get("batched_gemm_separate").bytes(axes, dtype) < moved
        else:
            assert operator.bytes(axes, dtype) == moved


def test_it_refuses_no_shape_of_powers_of_two(operator) -> None:
    axes = {name: {"h": 8, "kv": 8, "low": 64, "pairs": 2}.get(name, 128) for name in operator.axes}
    unbatched = [] if "b" in operator.axes else [dtype for dtype in SCHEMES if operator.takes(dtype)]
    assert all(operator.refusal(axes, dtype) is None for dtype in (*operator.dtypes, *unbatched))
