"""vLLM's classes of compressed models: its own class of the architecture, with what a plan changes."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.model_executor.layers.activation import SiluAndMul

from gac.runtime.header import header_of
from gac.runtime.vllm.check import is_multimodal
from gac.runtime.vllm.elementwise import use_kernels
from gac.runtime.vllm.embeddings import store_embeddings
from gac.runtime.vllm.experts import loading_of, sized_experts
from gac.runtime.vllm.heads import BACKEND, FewerHeads
from gac.runtime.vllm.linear import DenseLinearMethod
from gac.runtime.vllm.norms import stored_readers
from gac.runtime.vllm.planned import PlannedConfig
from gac.runtime.vllm.skip import skip
from gac.runtime.vllm.stored import StoredLinearMethod
from gac.runtime.vllm.stored_experts import load_expert, stored_layers

_PARAMETERS = {".first.weight": ".weight", ".second.weight": ".second", ".second.bias": ".bias"}
"""Names of parameters here, by the ends of the names in a checkpoint."""
_PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Siblings that the engine's Transformers backend merges, of which its class does not tell."""
_CONV1D = ("gpt2",)
"""Architectures whose dense weights lie transposed in a checkpoint; vLLM transposes all of them."""

_REPACKED = ("GPTNeoXForCausalLM",)
"""Classes of vLLM 0.26 that reorder rows of a weight by its name, which first factors have too."""


def __getattr__(name: str) -> Any:
    if not name.startswith("Gac"):
        raise AttributeError(name)
    return _compressed(name.removeprefix("Gac").partition("Of")[0])  # vLLM's classes run other configs too


@cache
def _compressed(architecture: str) -> type:
    is_own = architecture in ModelRegistry.models and architecture not in _REPACKED
    known = architecture if is_own else BACKEND
    dense = ModelRegistry.models[known].load_model_cls()
    bases = (_Compressed, FewerHeads, dense) if architecture == BACKEND else (_Compressed, dense)
    name = f"Gac{architecture}"
    return type(name, bases, {"__module__": __name__, "__qualname__": name})


class _Compressed:
    """A mixin before vLLM's class of the dense architecture."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        header = header_of(config)
        assert header is not None, "``Checks`` has read it"
        packed = {**_PACKED, **(getattr(self, "packed_modules_mapping", None) or {})}
        self._loading = loading_of(config.model_type)
        modules = {self._loading.name(name): module for name, module in header.modules.items()}
        planned = PlannedConfig(modules, packed)
        if is_multimodal(config) and (mapper := getattr(self, "hf_to_vllm_mapper", None)) is not None:
            planned.apply_vllm_mapper(mapper)
        vllm_config.quant_config = planned
        with sized_experts(planned.modules, planned.used):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        for name in sorted(planned.modules.keys() - planned.used):
            raise ValueError(f"{name} has no layer in vLLM's {type(self).__name__}; expected every weight to have one.")
        self._transposed = set(header.modules) if config.model_type in _CONV1D else set()
        self._skipped = {block["block"]: f"{block['block']}.{block['output']}" for block in header.skipped}
        for block in header.skipped:
            constant = header.modules[self._skipped[block["block"]]].module == "Constant"
            name = planned.name_of(self._loading.name(block["block"]))
            norms = [planned.name_of(norm) for norm in block["norms"]]
            skip(self, vllm_config, {**block, "block": name, "norms": norms}, constant)
        if header.head is not None:
            store_embeddings(self, header.head, vllm_config.model_config.dtype)  # type: ignore[arg-type]
        has_adapters = vllm_config.lora_config is not None  # they read norms, and add to gate and up
        if not has_adapters:
            _join_activations(self)
        use_kernels(self, {} if has_adapters else stored_readers(self))  # type: ignore[arg-type]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the tensors of a checkpoint; the names of factors become those of parameters here."""
        loaded: set[str] = super().load_weights(self._renamed(weights))  # type: ignore[misc]
        return loaded

    def _renamed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename factors, and leave out what skipped blocks do not read, such as norms of their queries."""
        experts = stored_layers(self)  # type: ignore[arg-type]
        nested = hasattr(getattr(self, "vision_tower", None), "vision_model")  # as it was in transformers once
        for name, tensor in weights:
            if nested and "vision_model." not in name:
                name = name.replace("vision_tower.", "vision_tower.vision_model.")
            module = name.rpartition(".")[0]
            block = next((block for block in self._skipped if name.startswith(f"{block}.")), None)
            if block is not None and module != self._skipped[block]:
                continue
            for old, new in _PARAMETERS.items():
                name = name.replace(old, new)
            transposed = name.endswith(".weight") and name.removesuffix(".weight") in self._transposed
            if not load_expert(experts, self._loading.name(name), tensor):
                yield from self._loading.tensors(name, tensor.t() if transposed else tensor)


def _join_activations(model: Any) -> None:
    """Let gate and up run the activation that follows, or the down projection where it quantises what that gives."""
    for module in model.modules():
        parts = dict(module.named_children())
        if parts.keys() != {"gate_up_proj", "act_fn", "down_proj"} or type(parts["act_fn"]) is not SiluAndMul:
            continue
        first, second = (getattr(parts[name], "quant_method", None) for name in ("gate_up_proj", "down_proj"))
        if isinstance(first, DenseLinearMethod) and isinstance(second, DenseLinearMethod):
            first.activation, second.gate_up = parts["act_fn"], parts["gate_up_proj"]
            module.act_fn = nn.Identity()
        if isinstance(first, StoredLinearMethod) and isinstance(second, StoredLinearMethod):
            first.hands_over = True
