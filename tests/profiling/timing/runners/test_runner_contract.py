"""What every runner must keep to."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gac.profiling.operators import OPERATORS
from gac.profiling.timing.operands import Pools
from gac.profiling.timing.runners import WORST_ERROR, Runner, relative_error, runner_of
from gac.runtime.storage.modules import Stored
from tests.profiling.examples import COLLECTIVES, EXAMPLES, ROUNDINGS, schemes_of

RUNNERS = {name: runner_of(name) for name in OPERATORS.names}

HERE = [
    pytest.param((runner_of(name, dtype), dtype), id=f"{name}-{dtype}")
    for name, runner in RUNNERS.items()
    if "cpu" in runner.devices and name not in COLLECTIVES
    for dtype in (*runner.operator.dtypes, *schemes_of(runner.operator))
]


def tensors(inputs: Sequence[Any]) -> Iterator[Tensor]:
    """All that is read: tensors, and those that hold weights."""
    for one in inputs:
        yield from one.tensors.values() if isinstance(one, Stored) else [one]


@pytest.fixture(params=HERE)
def ready(request) -> tuple[Runner, str, Sequence[Any], Sequence[Tensor]]:
    """A runner, the dtype, and its inputs and outputs."""
    runner, dtype = request.param
    axes, pools = EXAMPLES[runner.operator.name], Pools("cpu", limit_bytes=2**20)
    outputs = [pools.cut_output(operand) for operand in runner.operator.outputs(axes, dtype)]
    return runner, dtype, runner.operands(axes, dtype, pools.cut), outputs


def test_every_operator_has_a_runner_and_every_runner_its_operator() -> None:
    assert all(runner.operator is OPERATORS.get(name) for name, runner in RUNNERS.items())


def test_all_but_a_few_kernels_run_without_a_gpu() -> None:
    assert [name for name, runner in RUNNERS.items() if "cpu" not in runner.devices] == [
        "int4_linear",
        "sdpa_efficient",
        "sdpa_efficient_causal",
        "sdpa_cudnn",
        "sdpa_cudnn_causal",
        "latent_attention",
        "latent_attention_int8",
        "latent_attention_int4",
        *ROUNDINGS,
    ]


def test_its_operands_honour_the_description(ready) -> None:
    runner, dtype, inputs, _ = ready
    described = runner.operator.inputs(EXAMPLES[runner.operator.name], dtype)
    assert [tuple(one.shape) for one in inputs] == [operand.shape for operand in described]
    assert all(tensor.is_contiguous() for tensor in tensors(inputs))
    counted = [sum(map(_bytes, one.counted.values())) if isinstance(one, Stored) else _bytes(one) for one in inputs]
    assert counted == [operand.bytes for operand in described]


def _bytes(tensor: Tensor) -> int:
    return tensor.nbytes


def test_its_result_has_the_described_shapes_and_agrees_with_float32(ready) -> None:
    runner, dtype, inputs, outputs = ready
    result = runner.run(inputs, outputs)
    described = runner.operator.outputs(EXAMPLES[runner.operator.name], dtype)
    assert [tuple(part.shape) for part in result] == [one.shape for one in described[-len(result) :]]
    assert not any(bool(part.isnan().any()) for part in result)
    assert relative_error(runner, inputs, result) < WORST_ERROR


def test_it_leaves_its_inputs_alone_and_repeats_itself(ready) -> None:
    runner, _, inputs, outputs = ready
    before = [tensor.clone() for tensor in tensors(inputs)]
    first = [part.clone() for part in runner.run(inputs, outputs)]
    assert all(map(torch.equal, first, runner.run(inputs, outputs)))
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(before, tensors(inputs), strict=True))


def test_what_it_writes_lies_in_the_outputs_except_for_attention_and_storages(ready) -> None:
    runner, dtype, inputs, outputs = ready
    written = {part.data_ptr() for part in runner.run(inputs, outputs)}
    apart = runner.operator.name.startswith("sdpa") or dtype not in runner.operator.dtypes
    assert written.issubset(part.data_ptr() for part in outputs) != apart


@pytest.mark.parametrize("place", [0, -1])
def test_one_spoiled_or_unwritten_element_of_a_corner_is_seen(ready, place) -> None:
    runner, _, inputs, outputs = ready
    result = runner.run(inputs, outputs)
    for part in result:
        flat, kept = part.view(-1), part.view(-1)[place].clone()
        flat[place] = 1e3 * part.abs().max()
        assert relative_error(runner, inputs, result) > WORST_ERROR
        flat[place] = math.nan
        assert math.isnan(relative_error(runner, inputs, result))
        flat[place] = kept


def test_the_result_of_other_operands_is_seen(ready) -> None:
    runner, _, inputs, outputs = ready
    result = runner.run([inputs[0].roll(1, 0), *inputs[1:]], outputs)
    assert relative_error(runner, inputs, result) > WORST_ERROR
