"""What rounds inputs, timed by itself: its kernel, in Triton's interpreter where there is no GPU."""

import pytest
import torch

from gac.profiling.timing.operands import Pools
from gac.profiling.timing.runners import WORST_ERROR, relative_error, runner_of
from tests.profiling.examples import EXAMPLES, ROUNDINGS
from tests.runtime.interpreted import DEVICE


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter does not round to e4m3 at powers of two")
def test_it_finds_what_schemes_read(name: str) -> None:
    check(name)


def test_it_finds_whole_numbers_that_schemes_read() -> None:
    check("round_to_int8")


def check(name: str) -> None:
    """A wrong scale is seen."""
    runner, axes, pools = runner_of(name), EXAMPLES[name], Pools(DEVICE, limit_bytes=2**20)
    inputs = runner.operands(axes, "bf16", pools.cut)
    outputs = [pools.cut_output(operand) for operand in runner.operator.outputs(axes, "bf16")]
    numbers, scale = runner.run(inputs, outputs)
    assert (numbers.dtype, scale.dtype) == (outputs[0].dtype, torch.float32)
    assert (numbers.shape, scale.shape) == ((3, 48), (3, 1))
    assert relative_error(runner, inputs, [numbers, scale]) < 1e-3
    assert relative_error(runner, inputs, [numbers, 1.1 * scale]) > WORST_ERROR
