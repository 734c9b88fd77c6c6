"""vLLM's classes of compressed models: its own class of the architecture, with what a plan changes."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import vllm
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.models.utils import PPMissingLayer

from gac.runtime.header import Header, header_of
from gac.runtime.vllm.linear import DenseLinearMethod, PlannedConfig

_TESTED = ("0.26", "0.32")
_logger = logging.getLogger("gac")
_PARAMETERS = {".first.weight": ".weight", ".second.weight": ".second", ".second.bias": ".bias"}
"""Names of parameters here, by the ends of the names in a checkpoint."""
_KINDS = ("Linear", "LowRankLinear", "Absent", "Constant")
"""Modules that the engine runs, as ``config.json`` calls them."""
_PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Siblings that the engine's Transformers backend merges, of which its class does not tell."""


def __getattr__(name: str) -> Any:
    if not name.startswith("Gac"):
        raise AttributeError(name)
    return _compressed(name.removeprefix("Gac"))


@cache
def _compressed(architecture: str) -> type:
    dense = ModelRegistry.models[architecture].load_model_cls()
    name = f"Gac{architecture}"
    return type(name, (_Compressed, dense), {"__module__": __name__, "__qualname__": name})


class _Compressed:
    """A mixin before vLLM's class of the dense architecture."""

    packed_modules_mapping: dict[str, list[str]]

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        header = header_of(vllm_config.model_config.hf_config)
        if header is None:
            raise ValueError("config.json has no key gac; expected a model that GAC compressed.")
        _check_runs(header)
        if vllm_config.quant_config is not None:
            name = vllm_config.quant_config.get_name()
            raise ValueError(f"quantization {name} of a compressed model; expected none. Leave --quantization out.")
        _warn_of_version()
        planned = PlannedConfig(header.modules, {**_PACKED, **(self.packed_modules_mapping or {})})
        vllm_config.quant_config = planned
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        for name in sorted(header.modules.keys() - planned.used):
            if _has(self, name.rpartition(".")[0]):  # of this pipeline stage
                raise ValueError(
                    f"{name} has no layer in vLLM's {type(self).__name__}; expected every weight to have one."
                )
        self._skipped = {block["block"]: f"{block['block']}.{block['output']}" for block in header.skipped}
        for block in header.skipped:
            if _has(self, block["block"]):
                constant = header.modules[self._skipped[block["block"]]].module == "Constant"
                _skip(self, vllm_config, block, constant)

        if vllm_config.lora_config is None:  # an adapter adds to gate and up before their activation
            _join_activations(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the tensors of a checkpoint; the names of factors become those of parameters here."""
        loaded: set[str] = super().load_weights(_renamed(weights, self._skipped))  # type: ignore[misc]
        return loaded


def _renamed(weights: Iterable[tuple[str, Tensor]], skipped: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Rename factors, and leave out what skipped blocks do not read, such as norms of their queries.

    Args:
        skipped: names of skipped blocks, each with that of the module in it that writes its constant.
    """
    for name, tensor in weights:
        module = name.rpartition(".")[0]
        block = next((block for block in skipped if name.startswith(f"{block}.")), None)
        if block is None or module == skipped[block]:
            for old, new in _PARAMETERS.items():
                name = name.replace(old, new)
            yield name, tensor


def _check_runs(header: Header) -> None:
    for name, module in header.modules.items():
        if module.module not in _KINDS or module.storage is not None:
            kind = module.module if module.storage is None else f"in {module.storage}"
            raise ValueError(f"{name} is {kind}; expected {', '.join(_KINDS)} in 16 bits, which this engine runs.")
    if header.head is not None:
        raise ValueError("embedding and head are quantised; expected them in 16 bits, which this engine runs.")


def _warn_of_version() -> None:
    if not vllm.__version__.startswith(_TESTED):
        _logger.warning("vLLM %s; GAC's plugin was tested with %s", vllm.__version__, " and ".join(_TESTED))


def _has(model: Any, path: str) -> bool:
    try:
        return not isinstance(model.get_submodule(path), PPMissingLayer)
    except AttributeError:
        return False


def _join_activations(model: Any) -> None:
    """Let gate and up run the activation that follows, so that one launch does both where there is one token."""
    for module in model.modules():
        activation = getattr(module, "act_fn", None)
        gate_up: Any = getattr(module, "gate_up_proj", None)
        if type(activation) is SiluAndMul and isinstance(getattr(gate_up, "quant_method", None), DenseLinearMethod):
            gate_up.quant_method.activation = activation
            module.act_fn = nn.Identity()


def _skip(model: Any, vllm_config: Any, skipped: Any, constant: bool) -> None:
    """Leave out a block and the norms that only it reads. An attention has no KV cache then."""
    path, config = skipped["block"], vllm_config.model_config.hf_config
    block = SkippedBlock(skipped["output"], config.hidden_size if constant else 0, vllm_config.model_config.dtype)
    model.set_submodule(path, block)
    contexts = vllm_config.compilation_config.static_forward_context
    for name in [name for name in contexts if name.startswith(f"{path}.")]:
        del contexts[name]
    for name in skipped["norms"]:
        norm = SkippedNorm()
        norm._parameters.update(model.get_submodule(name)._parameters)
        model.set_submodule(name, norm)


class SkippedBlock(nn.Module):
    """An attention or MLP that writes zeros, or a constant.

    Args:
        output: name of the module whose bias is the constant.
        size: numbers of the constant; 0: there is none.
    """

    def __init__(self, output: str, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        constant = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if size else None
        self.output = output
        self.add_module(output, nn.Module())
        self.get_submodule(output).register_parameter("bias", constant)

    def forward(self, *args: Tensor, hidden_states: Tensor | None = None, **_: Any) -> Tensor:
        x = args[-1] if hidden_states is None else hidden_states
        constant: Any = self.get_submodule(self.output).bias
        return torch.zeros_like(x) if constant is None else constant.repeat(len(x), 1)


class SkippedNorm(nn.Module):
    """A norm that is left out; it still adds its input to the residual stream, as vLLM's norms do."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return x
        x = x + residual
        return x, x
