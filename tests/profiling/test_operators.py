"""What every operator must keep to; and what each of them costs."""

import math

import pytest
import torch

from gac.forms import linear, low_rank
from gac.profiling.operators import DTYPES, OPERATORS, WORST_ERROR, LowRank, Operator, Pool, relative_error

EXAMPLES = {"linear": linear(70, 96, 130).axes, "low_rank": low_rank(70, 96, 24, 130).axes}


def operands(operator: Operator, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    axes = EXAMPLES[operator.name]
    pool = Pool.random(100_000, dtype, "cpu")
    inputs = [pool.cut(shape) for shape in operator.inputs(axes)]
    return inputs, [torch.full(shape, math.nan, dtype=dtype) for shape in operator.outputs(axes)]


@pytest.fixture(params=OPERATORS.values(), ids=list(OPERATORS))
def operator(request) -> Operator:
    return request.param


def test_it_has_the_axes_of_its_operations(operator) -> None:
    assert tuple(EXAMPLES[operator.name]) == operator.axes


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_it_writes_every_element_and_agrees_with_float64(operator, dtype) -> None:
    inputs, outputs = operands(operator, dtype)
    operator.run(inputs, outputs)
    expected, *weights = (tensor.double() for tensor in inputs)
    for weight in weights:
        expected = expected @ weight.T
    assert float((outputs[-1].double() - expected).norm() / expected.norm()) < 1e-2
    assert relative_error(operator, inputs, outputs[-1]) < 1e-2


def test_a_wrong_corner_or_an_unwritten_element_is_seen(operator) -> None:
    inputs, outputs = operands(operator, torch.bfloat16)
    operator.run(inputs, outputs)
    outputs[-1][-8:, -8:] = 1000.0
    assert relative_error(operator, inputs, outputs[-1]) > WORST_ERROR
    outputs[-1][-1, -1] = math.nan
    assert math.isnan(relative_error(operator, inputs, outputs[-1]))


def test_flops_and_bytes_count_each_multiply_add_and_each_operand_once() -> None:
    axes = low_rank(2, 3, 5, 7).axes
    assert OPERATORS["low_rank"].flops(axes) == 2 * 2 * 5 * (3 + 7)
    assert OPERATORS["low_rank"].bytes(axes, 2) == 2 * (2 * 3 + 5 * 3 + 7 * 5 + 2 * 5 + 2 * 7)
    axes = linear(2, 3, 7).axes
    assert OPERATORS["linear"].flops(axes) == 2 * 2 * 3 * 7
    assert OPERATORS["linear"].bytes(axes, 2) == 2 * (2 * 3 + 3 * 7 + 2 * 7)


def test_weights_are_laid_out_as_nn_linear_keeps_them() -> None:
    _, first, second = LowRank().inputs(low_rank(2, 3, 5, 7).axes)
    assert first == torch.nn.Linear(3, 5).weight.shape
    assert second == torch.nn.Linear(5, 7).weight.shape


def test_a_pool_cuts_aligned_views_that_do_not_overlap_until_it_starts_again() -> None:
    pool = Pool(torch.zeros(1024, dtype=torch.bfloat16))
    views = [pool.cut((10, 10)) for _ in range(8)]
    assert [view.storage_offset() for view in views] == [0, 128, 256, 384, 512, 640, 768, 896]
    assert pool.cut((3, 50)).storage_offset() == 0


def test_a_random_pool_is_random_and_the_same_for_the_same_seed() -> None:
    pool = Pool.random(10_000, torch.bfloat16, "cpu").cut((10_000,))
    assert float(pool.float().std()) == pytest.approx(0.5, rel=0.05)
    assert torch.equal(pool, Pool.random(10_000, torch.bfloat16, "cpu").cut((10_000,)))
