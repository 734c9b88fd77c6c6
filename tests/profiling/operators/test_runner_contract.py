"""The contract of how every operator runs; kernels that need a GPU run in Triton's interpreter where there is none."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gac.plan.engines import STEPS
from gac.profiling.operators import OPERATORS, runner_of
from gac.profiling.operators.base import WORST_ERROR, Operator, Runner, relative_error
from gac.profiling.timing.operands import Pools
from gac.runtime.kernels import split_k as tiles
from gac.runtime.storage.modules import Stored
from tests.profiling.examples import COLLECTIVES, EXAMPLES, GPU_ONLY, ROUNDINGS, schemes_of
from tests.runtime.interpreted import DEVICE


class Run(NamedTuple):
    operator: Operator
    dtype: str
    runner: Runner
    inputs: Sequence[Any]
    outputs: Sequence[Tensor]

    @classmethod
    def of(cls, name: str, dtype: str, device: str = "cpu") -> "Run":
        operator, runner, pools = OPERATORS.get(name), runner_of(name, dtype), Pools(device, limit_bytes=2**20)
        inputs = runner.operands(EXAMPLES[name], dtype, pools.cut)
        outputs = operator.outputs(EXAMPLES[name], dtype)
        return cls(operator, dtype, runner, inputs, [pools.cut_output(operand) for operand in outputs])

    @property
    def tensors(self) -> Iterator[Tensor]:
        for operand in self.inputs:
            yield from operand.tensors.values() if isinstance(operand, Stored) else [operand]

    def result(self) -> Sequence[Tensor]:
        return self.runner.run(self.inputs, self.outputs)

    def error(self, result: Sequence[Tensor]) -> float:
        return relative_error(self.runner, self.inputs, result)


@pytest.fixture(
    params=[
        (name, dtype)
        for name in OPERATORS.names
        if name not in GPU_ONLY and name not in (*COLLECTIVES, *STEPS)
        for dtype in (*OPERATORS.get(name).dtypes[::2], *schemes_of(OPERATORS.get(name))[::3])
    ],
    ids="-".join,
)
def ready(request) -> Run:
    return Run.of(*request.param)


def test_operands_match_the_description(ready: Run) -> None:
    described = ready.operator.inputs(EXAMPLES[ready.operator.name], ready.dtype)
    assert [tuple(operand.shape) for operand in ready.inputs] == [operand.shape for operand in described]
    assert all(tensor.is_contiguous() for tensor in ready.tensors)
    counted = [list(x.counted.values()) if isinstance(x, Stored) else [x] for x in ready.inputs]
    assert [sum(tensor.nbytes for tensor in x) for x in counted] == [operand.bytes for operand in described]


def test_result_matches_the_description_and_float32_and_leaves_inputs_alone(ready: Run) -> None:
    before = [tensor.clone() for tensor in ready.tensors]
    first = [part.clone() for part in ready.result()]
    result = ready.result()
    described = ready.operator.outputs(EXAMPLES[ready.operator.name], ready.dtype)
    assert [tuple(part.shape) for part in result] == [operand.shape for operand in described[-len(result) :]]
    assert all(map(torch.equal, first, result))
    assert not any(bool(part.isnan().any()) for part in result)
    assert ready.error(result) < WORST_ERROR
    assert all(torch.equal(old.float(), new.float()) for old, new in zip(before, ready.tensors, strict=True))


def test_results_are_written_to_the_outputs_except_by_attention_and_storages(ready: Run) -> None:
    new = ready.operator.name.startswith("sdpa") or ready.dtype not in ready.operator.dtypes
    assert {part.data_ptr() for part in ready.result()}.issubset(out.data_ptr() for out in ready.outputs) != new


def test_a_wrong_or_unwritten_corner_and_the_result_of_other_operands_are_errors(ready: Run) -> None:
    result = ready.result()
    for part, position in product(result, (0, -1)):
        flat, correct = part.view(-1), part.view(-1)[position].clone()
        flat[position] = 1e3 * part.abs().max()
        assert ready.error(result) > WORST_ERROR
        flat[position] = math.nan
        assert math.isnan(ready.error(result))
        flat[position] = correct
    other = ready.runner.run([ready.inputs[0].roll(1, 0), *ready.inputs[1:]], ready.outputs)
    assert ready.error(other) > WORST_ERROR


@pytest.mark.parametrize("name", ["latent_attention", "latent_attention_int4"])
def test_attention_over_latents_is_attention_over_their_keys_and_values(name: str, monkeypatch) -> None:
    monkeypatch.setattr(tiles, "_processors", lambda device: 4)
    run = Run.of(name, "fp16", DEVICE)
    (mixed,) = run.result()
    assert mixed.shape == run.outputs[0].shape
    assert run.error([mixed]) < 5e-3
    assert run.error([1.1 * mixed]) > WORST_ERROR
    with pytest.raises(RuntimeError, match="latents have rank 20, no multiple of 8"):
        run.runner.operands({**EXAMPLES[name], "k": 20}, "fp16", lambda _: torch.empty(0))


@pytest.mark.parametrize("name", ROUNDINGS)
def test_inputs_are_quantised_as_schemes_read_them(name: str) -> None:
    if DEVICE == "cpu" and name == "round_to_fp8":
        pytest.skip("Triton's interpreter does not round to e4m3 at powers of two")
    run = Run.of(name, "bf16", DEVICE)
    numbers, scale = run.result()
    assert (numbers.dtype, scale.dtype) == (run.outputs[0].dtype, torch.float32)
    assert (numbers.shape, scale.shape) == ((3, 48), (3, 1))
    assert run.error([numbers, scale]) < 1e-3
    assert run.error([numbers, 1.1 * scale]) > WORST_ERROR
