"""Mixtures of experts in vLLM's own classes: each layer has its own number of experts, of its own width.

The engine's blocks read both from one config. While a model is built, the makers of routers and of routed experts take
the sizes of the plan instead, by the name of the layer.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import ModuleType
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.linear import ReplicatedLinear

from gac.runtime.header import Module
from gac.runtime.vllm.tuned import use_nearest_configs

_FACTORY = "FusedMoEFactory" if hasattr(fused_moe, "FusedMoEFactory") else "FusedMoE"  # vLLM 0.26 has the shorter name
_MODELS = "vllm.model_executor.models."
KINDS = ("Router", "Experts")
"""Modules of a plan that are no linear layers."""


_MATRICES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class _Loading:
    """The tensors of experts as a class of vLLM loads them.

    Attributes:
        names: parts of names in vLLM, by those in a checkpoint.
        matrices: names of gate, up and down of each expert by itself; none where the class takes stacks.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    matrices: Sequence[str] = _MATRICES

    def name(self, name: str) -> str:
        """Return the name in vLLM's model of a tensor or a module."""
        for old, new in self.names.items():
            if old in f"{name}.":
                return f"{name}.".replace(old, new)[:-1]
        return name

    def tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Return a tensor of a checkpoint as vLLM loads it."""
        name = self.name(name)
        stack, _, part = name.rpartition(".")
        if not self.matrices or not stack.endswith(".experts") or part not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            return
        gate, up, down = self.matrices
        for number, expert in enumerate(tensor):
            names, parts = ((gate, up), expert.chunk(2)) if part == "gate_up_proj" else ((down,), (expert,))
            for matrix, values in zip(names, parts, strict=True):
                yield f"{stack}.{number}.{matrix}.weight", values


_MIXTRAL = {".mlp.gate.": ".block_sparse_moe.gate.", ".mlp.experts.": ".block_sparse_moe.experts."}
_GRANITE = {
    ".block_sparse_moe.router.": ".block_sparse_moe.gate.",
    ".block_sparse_moe.experts.gate_up_proj.": ".block_sparse_moe.input_linear.weight.",
    ".block_sparse_moe.experts.down_proj.": ".block_sparse_moe.output_linear.weight.",
}
_LOADING = {
    "mixtral": _Loading(_MIXTRAL, ("w1", "w3", "w2")),
    "granitemoe": _Loading(_GRANITE, ()),
    "gpt_oss": _Loading({".self_attn.": ".attn."}, ()),
}
"""Classes that load them in another way than Qwen's."""


def loading_of(model_type: str) -> _Loading:
    return _LOADING.get(model_type, _Loading())


@contextmanager
def sized_experts(modules: Mapping[str, Module], used: set[str]) -> Iterator[None]:
    """Let the routers and the routed experts that are made take the sizes of a plan.

    Args:
        modules: of the plan, by their names in vLLM.
        used: names of those that were made, to be added to.
    """
    planned = {name: module.sizes for name, module in modules.items() if module.module in KINDS}
    if not planned:
        yield
        return
    if get_current_vllm_config().parallel_config.enable_eplb:
        raise ValueError("enable_eplb with experts that differ by layer; expected no balancing. Leave it out.")

    def take(name: str) -> Mapping[str, int] | None:
        if name not in planned:
            return None
        used.add(name)
        return planned[name]

    use_nearest_configs()
    with ExitStack() as stack:
        for kind in _linear_kinds():
            if "__init__" in vars(kind):
                _replace(stack, kind, "__init__", partial(_sized_router, take))
        for module in [module for name, module in sys.modules.items() if name.startswith(_MODELS)]:
            if getattr(module, _FACTORY, None) is getattr(fused_moe, _FACTORY):
                _replace(stack, module, _FACTORY, partial(_sized_stack, take))
        yield


def _linear_kinds() -> list[type]:
    kinds = [ReplicatedLinear]
    for kind in kinds:
        kinds += [other for other in kind.__subclasses__() if other not in kinds]
    return kinds


def _replace(stack: ExitStack, holder: type | ModuleType, name: str, wrap: Callable[[Any], Any]) -> None:
    stack.callback(setattr, holder, name, vars(holder)[name])
    setattr(holder, name, wrap(vars(holder)[name]))


_Take = Callable[[str], Mapping[str, int] | None]


def _sized_router(take: _Take, make: Callable[..., None]) -> Callable[..., None]:
    @wraps(make)
    def sized(layer: Any, input_size: int, output_size: int, *values: Any, **options: Any) -> None:
        sizes = take(options.get("prefix", ""))
        make(layer, input_size, output_size if sizes is None else sizes["experts"], *values, **options)

    return sized


def _sized_stack(take: _Take, make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def sized(*values: Any, **options: Any) -> Any:
        if (sizes := take(name := options.get("prefix", ""))) is not None:
            _check_divided(name, sizes["width"])
            options |= {"num_experts": sizes["experts"], "intermediate_size": sizes["width"]}
        return make(*values, **options)

    return sized


def _check_divided(name: str, width: int) -> None:
    parallel = get_current_vllm_config().parallel_config
    processes = 1 if parallel.enable_expert_parallel else parallel.tensor_parallel_size
    if width % processes:
        problem = f"{name} has {width} neurons; expected a multiple of {processes} processes"
        raise ValueError(f"{problem}. Make the plan with tensor_parallel={processes}, or serve it on one GPU.")
