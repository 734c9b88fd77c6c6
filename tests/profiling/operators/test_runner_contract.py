"""The contract of every operator: its description, and how it runs, in Triton's interpreter where there is no GPU."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gac.plan.engines import STEPS
from gac.profiling.operators import OPERATORS, operation, runner_of
from gac.profiling.operators.base import ITEM_BYTES, WORST_ERROR, Operand, Operator, Runner, relative_error
from gac.profiling.timing.operands import Pools
from gac.runtime.kernels import split_k as tiles
from gac.runtime.storage.modules import Stored
from tests.profiling.examples import COLLECTIVES, COUNTS, EXAMPLES, GPU_ONLY, ROUNDINGS, SCHEMES, schemes_of
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
