"""Routed experts: gate and up, the activation, and down, of the experts that each token takes.

The router is a GEMM by itself. Tokens take experts at random, all alike: a trained router sends tokens of one text to
fewer of them, whose weights then are read in less time.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from gac.core.operations import EXPERTS
from gac.plan.engines import VLLM
from gac.profiling.operators.base import (
    ACTIVATIONS,
    ITEM_BYTES,
    WORST_ROUNDED_ERROR,
    Axes,
    AxisSweep,
    Operand,
    Operator,
    Runner,
    edges,
)
from gac.schemes import Scheme, scheme_timed_as

if TYPE_CHECKING:
    from torch import Tensor, nn


_CONTEXT = ExitStack()


class RoutedExperts(Operator):
    """``m`` tokens, each through ``t`` of ``e`` experts with SiLU and a gate, ``k`` features and ``n`` neurons.

    As transformers runs them: one grouped GEMM over the tokens sorted by expert, and another one.
    """

    name = EXPERTS
    axes = ("m", "e", "t", "k", "n")
    writes = ("m k",)
    smooth = True
    cublas = False
    compressed_axis = "e"
    general: tuple[AxisSweep, ...] = ()

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        m, e, t, k, n = (axes[name] for name in self.axes)
        numbers = Operand((m, t), "int64")  # of the experts that each token takes
        return Operand((m, k), dtype), Operand((e, 2 * n, k), dtype), Operand((e, k, n), dtype), numbers

    def flops(self, axes: Axes) -> int:
        return 6 * axes["m"] * axes["t"] * axes["k"] * axes["n"]

    def unmet(self, axes: Axes) -> str | None:
        return None if axes["t"] <= axes["e"] else "at most as many experts of a token (t) as there are (e)"

    def operands(self, axes: Axes, dtype: str, cut: Callable[[Operand], "Tensor"]) -> Sequence[Any]:
        *tensors, numbers = super().operands(axes, dtype, cut)
        return [*tensors, numbers.copy_(_numbers(axes["m"], axes["e"], axes["t"]))]

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        x, gate_up, down, numbers = inputs
        module: Any = _module(*down.shape[:0:-1])
        module._parameters.update(gate_up_proj=gate_up, down_proj=down)
        module.num_experts = len(down)
        return [module(x, numbers, _weights(numbers).to(x.dtype))]

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        import torch
        from torch.nn.functional import silu

        x, gate_up, down, numbers = inputs
        rows = edges(len(x), x.device)
        expected = []
        for row in rows.tolist():
            gate, up = (gate_up[numbers[row]].float() @ x[row].float()).chunk(2, dim=-1)
            wrote = (down[numbers[row]].float() @ (silu(gate) * up)[..., None])[..., 0]
            expected.append(wrote.mean(0))
        return result[0][rows], torch.stack(expected)


class ServedExperts(RoutedExperts):
    """The same as GAC's plugin runs them in vLLM: in the engine's kernel, with the configs of the nearest tuned sizes.

    It is measured with a Python that has vLLM.
    """

    name = f"served_{EXPERTS}"

    def takes(self, dtype: str) -> bool:
        scheme = None if dtype in ITEM_BYTES else scheme_timed_as(dtype)
        return dtype in self.dtypes if scheme is None else VLLM.runs_experts(scheme)

    def inputs(self, axes: Axes, dtype: str) -> tuple[Operand, ...]:
        if dtype in ITEM_BYTES:
            return super().inputs(axes, dtype)
        x, *stacks, numbers = super().inputs(axes, ACTIVATIONS)
        scales = (Operand((*stack.shape[:-1], 1), "fp32") for stack in stacks)
        return x, *(replace(stack, dtype="fp8") for stack in stacks), *scales, numbers

    def runner_in(self, scheme: Scheme) -> Runner | None:
        return ServedExpertsInFp8() if VLLM.runs_experts(scheme) else None

    def run(self, inputs: Sequence["Tensor"], outputs: Sequence["Tensor"]) -> Sequence["Tensor"]:
        import torch

        fused_experts, in_fp8 = _kernel()
        x, gate_up, down, *scales, numbers = inputs
        config = in_fp8(*scales, per_act_token_quant=True, per_out_ch_quant=True) if scales else None
        return [fused_experts(x, gate_up, down, _weights(numbers), numbers.to(torch.int32), quant_config=config)]


class ServedExpertsInFp8(ServedExperts):
    """The same with weights in 8-bit floating point, and a scale for each of their rows; it rounds tokens itself."""

    worst_error = WORST_ROUNDED_ERROR

    def compare(self, inputs: Sequence["Tensor"], result: Sequence["Tensor"]) -> tuple["Tensor", "Tensor"]:
        """Compare with products of the rounded numbers, as ``RoutedExperts`` with those of its inputs."""
        import torch
        from torch.nn.functional import silu

        x, gate_up, down, *scales, numbers = inputs
        rows = edges(len(x), x.device)
        expected = []
        for row in rows.tolist():
            first, second = (
                stack.view(torch.uint8)[numbers[row]].view(stack.dtype).float() * scale[numbers[row]]
                for stack, scale in zip((gate_up, down), scales, strict=True)
            )
            gate, up = (first @ _rounded(x[row])).to(x.dtype).chunk(2, dim=-1)
            wrote = second @ _rounded(silu(gate.float()).to(x.dtype) * up)[..., None]
            expected.append(wrote[..., 0].mean(0))
        return result[0][rows], torch.stack(expected)


def _rounded(tokens: "Tensor") -> "Tensor":
    from gac.runtime.storage.eight_bits import READERS

    numbers, scale = READERS["float8"](tokens)
    return numbers.float() * scale


@cache
def _numbers(tokens: int, experts: int, top_k: int) -> "Tensor":
    import torch

    draw = torch.Generator().manual_seed(0)
    return torch.rand(tokens, experts, generator=draw).topk(top_k, dim=1).indices


def _weights(numbers: "Tensor") -> "Tensor":
    return numbers.float().fill_(1 / numbers.shape[1])


@cache
def _module(neurons: int, features: int) -> "nn.Module":
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=features, intermediate_size=neurons, num_local_experts=1)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module: nn.Module = MixtralExperts(config)
    return module


@cache
def _kernel() -> tuple[Callable[..., "Tensor"], Callable[..., Any]]:
    """Return vLLM's kernel, and what makes its description of numbers in fp8."""
    try:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    except ImportError as failure:
        problem = f"vLLM cannot be imported ({failure}); measure routed experts of vLLM with a Python that has it"
        raise RuntimeError(problem) from failure
    from gac.runtime.vllm.tuned import use_nearest_configs

    use_nearest_configs()
    _CONTEXT.enter_context(set_current_vllm_config(VllmConfig()))  # the kernel asks for one
    return fused_experts, fp8_w8a8_moe_quant_config


OPERATORS = (RoutedExperts(), ServedExperts())
