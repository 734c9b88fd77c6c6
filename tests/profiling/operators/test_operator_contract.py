"""What the description of every operator must keep to."""

from collections.abc import Mapping

import pytest

from gac.plan.engines import STEPS
from gac.profiling.operators import OPERATORS, operation
from gac.profiling.operators.base import ITEM_BYTES, Operand, Operator
from tests.profiling.examples import COUNTS, EXAMPLES, ROUNDINGS, SCHEMES, schemes_of


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


def test_its_example_is_an_operation_of_it_with_two_flops_a_multiplication(operator, axes) -> None:
    assert operation(operator.name, **axes).shape == tuple((name, axes[name]) for name in operator.axes)
    assert operator.flops(axes) == 2 * COUNTS[operator.name](**axes)


def test_its_operands_are_of_known_dtypes_and_of_sizes_from_1_and_its_results_too(operator, axes) -> None:
    assert operator.stored == bool(schemes_of(operator))
    for dtype in schemes_of(operator):
        activations, *weights = operator.inputs(axes, dtype)
        assert {operand.dtype for operand in (activations, *operator.outputs(axes, dtype))} == {"bf16"}
        assert {operand.dtype for operand in weights} == {dtype}
    floating = {"bf16", "fp16"} | ({"fp8", "int8", "fp32"} if operator.name in ROUNDINGS else set())
    for dtype in operator.dtypes:
        assert operator.name in STEPS or operator.inputs(axes, dtype)[0].dtype == dtype
        assert all(
            operand.dtype in ITEM_BYTES and min(operand.shape) >= 1 for operand in operands(operator, axes, dtype)
        )
        assert {operand.dtype for operand in operator.outputs(axes, dtype)} <= floating


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
