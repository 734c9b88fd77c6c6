"""The contract of every operator, in Triton's interpreter where there is no GPU; its shapes; references of results."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gac.core import operations
from gac.core.errors import ProfileError
from gac.forms.low_rank import low_rank
from gac.plan.engines import MIXTURE_STEPS, STEPS
from gac.profiling.operators import OPERATORS, experts, operation, runner_of
from gac.profiling.operators.base import ITEM_BYTES, WORST_ERROR, Operand, Operator, Runner, relative_error
from gac.profiling.sweeps.coverage import model_points
from gac.profiling.timing.operands import Pools
from gac.runtime.kernels import gpu
from gac.runtime.storage.base import Storage, Tensors
from gac.runtime.storage.modules import STORAGES, Stored
from gac.schemes import SCHEMES as KNOWN_SCHEMES
from gac.schemes import Scheme, StorageSpec, scheme_named
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


RUNS = [
    (operator.name, dtype)
    for operator in OPERATORS
    if operator.name not in {*GPU_ONLY, *COLLECTIVES, *STEPS, *MIXTURE_STEPS}
    for dtype in (*operator.dtypes[::2], *schemes_of(operator)[::3])
]


@pytest.fixture(params=RUNS, ids="-".join)
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
    new = ready.operator.name.startswith(("sdpa", "experts")) or ready.dtype not in ready.operator.dtypes
    assert {part.data_ptr() for part in result}.issubset(out.data_ptr() for out in ready.outputs) != new


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
    monkeypatch.setattr(gpu, "processors", lambda device: 4)
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
    assert set(EXAMPLES) == set(COUNTS) == set(OPERATORS.names)
    return request.param


@pytest.fixture
def axes(operator) -> Mapping[str, int]:
    return EXAMPLES[operator.name]


def operands(operator: Operator, axes: Mapping[str, int], dtype: str) -> tuple[Operand, ...]:
    return *operator.inputs(axes, dtype), *operator.outputs(axes, dtype)


def test_its_operands_are_of_known_dtypes_and_of_sizes_from_1_and_its_results_too(operator, axes) -> None:
    in_own_way = (*STEPS, *MIXTURE_STEPS, "served_experts")
    assert operator.stored == (bool(schemes_of(operator)) and operator.name not in in_own_way)
    for dtype in schemes_of(operator) if operator.stored else ():
        activations, *weights = operator.inputs(axes, dtype)
        assert {operand.dtype for operand in (activations, *operator.outputs(axes, dtype))} == {"bf16"}
        assert {operand.dtype for operand in weights} == {dtype}
    floating = {"bf16", "fp16"} | ({"fp8", "int8", "fp32"} if operator.name in ROUNDINGS else set())
    for dtype in operator.dtypes:
        assert operator.name in (*STEPS, *MIXTURE_STEPS) or operator.inputs(axes, dtype)[0].dtype == dtype
        moved = operands(operator, axes, dtype)
        assert all(operand.dtype in ITEM_BYTES and min(operand.shape) >= 1 for operand in moved)
        assert {operand.dtype for operand in operator.outputs(axes, dtype)} <= floating


def test_its_example_is_an_operation_of_it_and_flops_and_bytes_are_those_of_its_operands(operator, axes) -> None:
    assert operation(operator.name, **axes).shape == tuple((name, axes[name]) for name in operator.axes)
    assert operator.flops(axes) == 2 * COUNTS[operator.name](**axes)
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


GQA = {"b": 2, "h": 6, "kv": 2, "s": 70, "t": 70, "d": 24}


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
    monkeypatch.setitem(KNOWN_SCHEMES._known, "halved", Halved())
    (x, weight), result = run("linear", "halved-timed", m=9, k=20, n=30)
    assert near(result[0], x.double() @ weight.tensors["halves"].double().T / 2)
    assert {point.dtype for point in model_points("smollm2", schemes=("halved",))} == {"bf16", "halved-timed"}
    assert OPERATORS.get("linear").bytes({"m": 1, "k": 20, "n": 30}, "halved-timed") == 2 * 20 + 20 * 30 + 2 * 30


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
    assert takes == ["linear", "low_rank", "batched_gemm", "served_step", "served_step_of_experts"]
    linear = OPERATORS.get("linear")
    assert [linear.takes(dtype) for dtype in ("bf16", "fp8", "fp8_dynamic", "int8", "w99a16")] == [1, 1, 1, 0, 0]
    assert operation("linear", n=7, m=2, k=3) == operations.linear(2, 3, 7)
    assert operation("low_rank", r=5, n=7, m=2, k=3) == low_rank(2, 3, 5, 7)


def test_experts_in_fp8_are_compared_with_products_of_rounded_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = scheme_named("fp8")
    read: dict[str, Any] = {}

    def kernel(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, quant_config: Any) -> Tensor:
        scales, read["options"] = quant_config
        first, second = (numbers.float() * scale for numbers, scale in zip((gate_up, down), scales, strict=True))
        out = torch.zeros_like(x, dtype=torch.float32)
        for token, expert in product(range(len(ids)), range(ids.shape[1])):
            number = int(ids[token, expert])
            gate, up = (first[number] @ rounded(x[token])).bfloat16().chunk(2)
            hidden = rounded(torch.nn.functional.silu(gate) * up)
            out[token] += weights[token, expert] * (second[number] @ hidden)
        return out.bfloat16()

    def rounded(row: Tensor) -> Tensor:
        scale = row.float().abs().max() / 448
        return (row.float() / scale).to(torch.float8_e4m3fn).float() * scale

    monkeypatch.setattr(experts, "_kernel", lambda: (kernel, lambda *scales, **options: (scales, options)))
    run = Run.of("served_experts", scheme.dtype)
    assert [tensor.dtype for tensor in run.inputs[1:5]] == [torch.float8_e4m3fn] * 2 + [torch.float32] * 2
    (y,) = run.result()
    assert read["options"] == {"per_act_token_quant": True, "per_out_ch_quant": True}
    assert run.error([y]) < 1e-2 < WORST_ERROR < run.runner.worst_error
    assert run.error([y.roll(1, 0)]) > run.runner.worst_error
    assert not OPERATORS.get("served_experts").takes("w4a16")
    with pytest.raises(ProfileError, match="served_experts in scheme w4a16"):
        runner_of("served_experts", "w4a16")


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 2e-2), ("w4a16", 2e-2), ("fp8_dynamic", 5e-2)])
def test_results_whose_inputs_are_rounded_may_be_further_off(dtype: str, bound: float) -> None:
    assert runner_of("linear", dtype).worst_error == bound
